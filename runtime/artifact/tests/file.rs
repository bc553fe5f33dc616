//! The file format: a file gives back what was written, and damage is reported.

#![allow(
    unsafe_code,
    reason = "a global allocator is unsafe to implement; this one forwards to the system's"
)]

use lighterage_artifact::*;
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::PathBuf;

/// Records the largest allocation of each thread: a hostile length would cause a large one.
struct Watching;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
    static TOTAL: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: forwards every call unchanged to the system's allocator; realloc and alloc_zeroed use
// these two.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(layout.size()));
        TOTAL.set(TOTAL.get() + layout.size());
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is the same.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// One of everything.
fn example() -> Artifact {
    let operand = |offset| Operand {
        place: Place { pool: 0, offset },
        dtype: DType::BF16,
        shape: vec![4, 8],
    };
    let attrs = [
        ("a", Attr::Int(-1)),
        ("b", Attr::Float(0.1)),
        ("c", Attr::Bool(true)),
        ("d", Attr::Ints(vec![1, -2])),
        ("e", Attr::Type(DType::F8E5M2)),
        ("f", Attr::Str("é".into())),
    ];
    let kind = |kind| Command {
        stream: 1,
        line: 0,
        kind,
    };
    let ty = Type {
        dtype: DType::F32,
        shape: vec![2, 3],
    };
    let code = Code {
        object: 0,
        phases: vec![Phase {
            symbol: "k0".into(),
            parts: 2,
            threads: 1,
            shared_bytes: 0,
        }],
        ins: vec![ty.clone(), ty.clone()],
        outs: vec![ty],
        inplace: vec![(0, 0)],
        scratch: 7,
    };
    Artifact {
        name: "mlp".into(),
        device: "h200".into(),
        tf32: true,
        pools: vec![Pool {
            name: "device".into(),
            space: MemorySpace::Device(0),
            bytes: 1 << 40,
            lent: false,
        }],
        streams: vec!["compute".into(), "h2d".into()],
        pause: None,
        events: 1,
        kernels: vec![Kernel {
            op: "add".into(),
            attrs: attrs.map(|(k, v)| (k.to_string(), v)).into(),
            code: Some(code),
        }],
        objects: vec![Object {
            target: Target::Cpu(Cpu::X86_64V3),
            bytes: vec![1, 2, 3],
        }],
        lines: vec![Line {
            name: "h1".into(),
            why: "run".into(),
        }],
        commands: vec![
            kind(CommandKind::Launch {
                kernel: 0,
                ins: vec![operand(0), operand(64)],
                outs: vec![operand(0)],
                scratch: Some(Range {
                    place: Place {
                        pool: 0,
                        offset: 128,
                    },
                    bytes: 7,
                }),
            }),
            kind(CommandKind::Copy {
                src: operand(0).place,
                dst: operand(64).place,
                bytes: 64,
            }),
            kind(CommandKind::Record { event: 0 }),
            kind(CommandKind::Wait {
                event: 0,
                previous: true,
            }),
        ],
        inputs: vec![Binding {
            name: "x".into(),
            operand: operand(0),
        }],
        outputs: vec![Binding {
            name: "loss".into(),
            operand: operand(64),
        }],
        states: vec![State {
            path: "w".into(),
            kind: StateKind::Moment,
            operand: operand(0),
            initial: Initial::Data { start: 0, bytes: 3 },
        }],
        summary: Summary {
            planned_peak_bytes: 1 << 40,
            keep_peak_bytes: 2 << 40,
            budget_bytes: Some(3),
            predicted_ms: 1.5,
            swapped_bytes: 4,
            recomputed_ms: 0.25,
            micro_batches: 3,
            optimizer: Some(("adamw".into(), vec![("lr".into(), 1e-3)])),
            groups: vec![vec![("weight_decay".into(), 0.0)]],
        },
        data: (0..100).collect(),
        others: vec![],
    }
}

#[test]
fn steps_that_share_states_are_in_one_file() {
    let other = |name: &str| Artifact {
        name: name.into(),
        data: vec![],
        ..example()
    };
    let artifact = Artifact {
        others: vec![other("half"), other("quarter")],
        ..example()
    };
    let read = read(&write(&artifact)).unwrap();
    assert_eq!(read, artifact);
    assert_ne!(fingerprint(&read), fingerprint(&example()));
}

/// A temporary folder, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("lighterage-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
    fn names(&self) -> Vec<String> {
        let names = std::fs::read_dir(&self.0)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap());
        names.collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A file with right checksums, for any body and data.
fn sealed(version: u32, body: &[u8], data: &[u8]) -> Vec<u8> {
    let mut padded = body.to_vec();
    padded.resize(body.len().next_multiple_of(64), 0);
    let mut file = b"\x89LIT\r\n\x1a\n".to_vec();
    file.extend(version.to_le_bytes());
    file.extend([0; 4]);
    file.extend((body.len() as u64).to_le_bytes());
    file.extend((data.len() as u64).to_le_bytes());
    file.extend(crc32fast::hash(&padded).to_le_bytes());
    file.extend(crc32fast::hash(data).to_le_bytes());
    file.extend([0; 20]);
    file.extend(crc32fast::hash(&file).to_le_bytes());
    [file, padded, data.to_vec()].concat()
}

/// The body in a file of ours.
fn body(file: &[u8]) -> &[u8] {
    let bytes = u64::from_le_bytes(file[16..24].try_into().unwrap()) as usize;
    &file[64..64 + bytes]
}

#[test]
fn what_is_written_comes_back() {
    for artifact in [example(), Artifact::default()] {
        let bytes = write(&artifact);
        assert_eq!(read(&bytes).unwrap(), artifact);
        assert_eq!(write(&artifact), bytes);
        assert_eq!(sealed(FORMAT_VERSION, body(&bytes), &artifact.data), bytes);
    }
}

#[test]
fn every_cut_is_told() {
    let bytes = write(&example());
    for len in 0..bytes.len() {
        let error = read(&bytes[..len]).unwrap_err();
        assert!(error.to_string().contains("cut off"), "{len}: {error}");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert!(
        read(&longer)
            .unwrap_err()
            .to_string()
            .contains("1 more than it should")
    );
}

#[test]
fn every_flipped_bit_is_told() {
    let mut bytes = write(&example());
    for bit in 0..8 * bytes.len() {
        bytes[bit / 8] ^= 1 << (bit % 8);
        let error = read(&bytes).unwrap_err();
        let expected = match bit / 64 {
            0 => matches!(error, ReadError::NotAnArtifact),
            1 if bit < 96 => matches!(error, ReadError::Version { .. }),
            _ => matches!(error, ReadError::Damaged { .. }),
        };
        assert!(expected, "bit {bit}: {error}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn later_versions_are_told_as_such() {
    // The rest after the version is defined by the later version.
    for file in [
        sealed(10, b"anything", b""),
        [&b"\x89LIT\r\n\x1a\n\x0a\0\0\0"[..], &[0xAA; 99]].concat(),
    ] {
        let error = read(&file).unwrap_err();
        assert_eq!(error, ReadError::Version { found: 10 });
        let expected = format!(
            "format version 10, this program reads version {FORMAT_VERSION}: it was written by a \
             later"
        );
        assert!(error.to_string().contains(&expected), "{error}");
    }
}

#[test]
fn lengths_beyond_the_file_allocate_nothing() {
    let mut file = sealed(FORMAT_VERSION, b"", b"");
    for (body, data) in [
        (u64::MAX, 0),
        (1 << 62, 1 << 62),
        (0, u64::MAX - 64),
        (u64::MAX - 63, u64::MAX),
    ] {
        file[16..24].copy_from_slice(&u64::to_le_bytes(body));
        file[24..32].copy_from_slice(&u64::to_le_bytes(data));
        let crc = crc32fast::hash(&file[..60]);
        file[60..64].copy_from_slice(&crc.to_le_bytes());
        LARGEST.set(0);
        assert!(read(&file).is_err());
        assert!(LARGEST.get() < 1000);
    }
}

#[test]
fn earlier_versions_are_told_as_such() {
    let error = read(&sealed(3, b"anything", b"")).unwrap_err();
    assert_eq!(error, ReadError::Version { found: 3 });
    assert!(
        error
            .to_string()
            .ends_with("by an earlier release; compile again with this one")
    );
}

/// The limit that the module's text promises for decoding: a constant times the body, plus a list's
/// megabyte.
fn warranted(file: &[u8]) -> usize {
    (1 << 20) + 128 * file.len()
}

#[test]
fn lists_that_claim_to_be_long_allocate_little() {
    // Name, device, then pools: 2^60 of them.
    let mut claim = vec![0, 0];
    claim.extend([0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x10]);
    let file = sealed(FORMAT_VERSION, &claim, b"");
    LARGEST.set(0);
    assert!(matches!(read(&file), Err(ReadError::Malformed { .. })));
    assert!(LARGEST.get() <= warranted(&file), "{}", LARGEST.get());
    // The same, honestly: a million empty stream names.
    let artifact = Artifact {
        streams: vec![String::new(); 1_000_000],
        ..Artifact::default()
    };
    let file = write(&artifact);
    LARGEST.set(0);
    assert_eq!(read(&file).unwrap(), artifact);
    assert!(LARGEST.get() <= warranted(&file), "{}", LARGEST.get());
}

#[test]
fn bodies_with_something_behind_are_refused() {
    let bytes = write(&example());
    let longer = [body(&bytes), &[0]].concat();
    let error = read(&sealed(FORMAT_VERSION, &longer, b"")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the file's body is not an artifact's: 1 bytes follow it"
    );
}

#[test]
fn files_are_replaced_as_a_whole() {
    let folder = Folder::new("whole");
    let path = folder.0.join("a.lit");
    let (small, large) = (
        Artifact::default(),
        Artifact {
            data: vec![7; 3 << 20],
            ..example()
        },
    );
    write_file(&path, &small).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for i in 0..40 {
                write_file(&path, if i % 2 == 0 { &large } else { &small }).unwrap();
            }
        });
        while !writer.is_finished() {
            let found = read_file(&path).expect("at every moment the file should be whole");
            assert!(found == small || found == large);
        }
    });
    assert_eq!(folder.names(), ["a.lit"]);
}

#[test]
fn a_write_that_fails_leaves_the_old_file() {
    let folder = Folder::new("fails");
    let path = folder.0.join("a.lit");
    write_file(&path, &example()).unwrap();
    // A killed write leaves its file behind, which does no harm.
    std::fs::write(
        folder
            .0
            .join(format!(".a.lit.{}-0.tmp", std::process::id())),
        "half",
    )
    .unwrap();
    std::fs::create_dir(folder.0.join("taken")).unwrap();
    assert!(write_file(folder.0.join("taken"), &example()).is_err());
    assert!(write_file(folder.0.join("no/such/folder.lit"), &example()).is_err());
    assert_eq!(read_file(&path).unwrap(), example());
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error_and_devices_stay_devices() {
    use std::os::unix::fs::FileTypeExt;
    assert!(write_file("/dev/full", &example()).is_err());
    write_file("/dev/null", &example()).unwrap();
    assert!(
        std::fs::metadata("/dev/null")
            .unwrap()
            .file_type()
            .is_char_device()
    );
}

#[cfg(unix)]
#[test]
fn links_stay_links() {
    let folder = Folder::new("links");
    let (file, link) = (folder.0.join("a.lit"), folder.0.join("b.lit"));
    write_file(&file, &Artifact::default()).unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    write_file(&link, &example()).unwrap();
    assert_eq!(read_file(&file).unwrap(), example());
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
}

#[test]
fn what_is_no_file_is_told() {
    let folder = Folder::new("none");
    let missing = read_file(folder.0.join("x.lit")).unwrap_err().to_string();
    assert!(missing.contains("x.lit: No such file"), "{missing}");
    let directory = read_file(&folder.0).unwrap_err().to_string();
    assert!(directory.contains("not a regular file"), "{directory}");
    let text = folder.0.join("text.lit");
    std::fs::write(&text, "a text").unwrap();
    assert_eq!(read_file(&text).unwrap_err(), ReadError::NotAnArtifact);
    std::fs::write(&text, &write(&example())[..200]).unwrap();
    assert!(matches!(
        read_file(&text),
        Err(ReadError::Length {
            expected: Some(_),
            found: 200
        })
    ));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 4000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(read(&bytes).is_err());
    }

    /// Random damage to a body with right checksums: an error or some artifact, and no
    /// disproportionate allocation.
    #[test]
    fn hostile_bodies_end_well(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut: prop::sample::Index,
    ) {
        let bytes = write(&example());
        let mut body = body(&bytes).to_vec();
        for (at, byte) in damage {
            let at = at.index(body.len());
            body[at] = byte;
        }
        body.truncate(cut.index(2 * body.len()));
        let file = sealed(FORMAT_VERSION, &body, b"");
        LARGEST.set(0);
        TOTAL.set(0);
        let result = read(&file);
        prop_assert!(LARGEST.get() <= warranted(&file));
        prop_assert!(TOTAL.get() <= 16 * warranted(&file));
        if let Ok(artifact) = result {
            prop_assert_eq!(
                read(&write(&artifact)).map(|a| write(&a)),
                Ok(write(&artifact))
            );
        }
    }
}
