//! A folder of checkpoints: what is written is read, what is damaged is found, and what is kept.

use artifact::DType;
use lighterage_checkpoint::{
    Checkpoint, Error, Kept, LATEST, MANIFEST, Manifest, Part, Store, Tensor,
};
use lighterage_checkpoint::{newest_first, tensors::CHUNK_BYTES};
use std::fs;
use std::num::NonZeroU64;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A folder that is removed when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("checkpoint-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Folder(path)
    }
    fn steps(&self) -> Vec<u64> {
        let found = newest_first(&self.0).unwrap();
        found.into_iter().map(|(step, _)| step).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The last one is longer than a chunk, and one is empty.
fn tensors() -> Vec<Tensor> {
    let tensor = |name: &str, dtype, shape: &[u64], part| Tensor {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        part,
    };
    vec![
        tensor("w", DType::BF16, &[3, 5], Part::Model),
        tensor("embed", DType::F32, &[7], Part::Frozen),
        tensor("mask", DType::Bool, &[3], Part::Constants),
        tensor("empty", DType::F32, &[0, 4], Part::Model),
        tensor(
            "moment",
            DType::F32,
            &[CHUNK_BYTES as u64 / 4 + 3],
            Part::Training,
        ),
    ]
}

/// Some bytes that depend on the tensor, the step and the position. Frozen tensors do not change.
fn byte(tensor: &Tensor, step: u64, at: u64) -> u8 {
    let step = if tensor.part.is_frozen() { 0 } else { step };
    (at.wrapping_mul(31) ^ step.wrapping_mul(7) ^ tensor.name.len() as u64) as u8
}

fn save(store: &mut Store, step: u64) -> Result<PathBuf, Error> {
    let tensors = tensors();
    let manifest = Manifest {
        model: "test".into(),
        step,
        batches: 3 * step,
        ..Manifest::default()
    };
    let frozen_is_written = store.has_frozen();
    let saved = store.save(manifest, &tensors, &mut |number, start, bytes| {
        let tensor = &tensors[number];
        assert!(!(frozen_is_written && tensor.part.is_frozen()));
        for (at, to) in (start..).zip(bytes) {
            *to = byte(tensor, step, at);
        }
        Ok(())
    })?;
    assert!(saved.not_done.is_none(), "{:?}", saved.not_done);
    Ok(saved.path)
}

fn check(path: &Path, step: u64) {
    let checkpoint = Checkpoint::open(path).unwrap();
    assert_eq!(checkpoint.manifest().step, step);
    assert_eq!(checkpoint.manifest().batches, 3 * step);
    assert_eq!(checkpoint.entries().len(), tensors().len());
    for tensor in tensors() {
        let entry = &checkpoint.entries()[&tensor.name];
        assert_eq!((entry.dtype, &entry.shape), (tensor.dtype, &tensor.shape));
        assert_eq!(entry.part, tensor.part);
        let mut read = vec![];
        checkpoint
            .read(&tensor.name, |start, bytes| {
                assert_eq!(start, read.len() as u64);
                read.extend_from_slice(bytes);
                Ok::<(), Error>(())
            })
            .unwrap();
        let written = (0..tensor.bytes()).map(|at| byte(&tensor, step, at));
        assert!(read.into_iter().eq(written), "{}", tensor.name);
    }
}

#[test]
fn what_is_written_is_read() {
    let folder = Folder::new("written");
    let mut store = Store::open(&folder.0, Kept::default()).unwrap();
    for step in [1, 20] {
        let path = save(&mut store, step).unwrap();
        check(&path, step);
        check(&folder.0.join(LATEST), step);
    }
    assert_eq!(folder.steps(), [20, 1]);
}

#[test]
fn every_change_of_a_byte_is_found() {
    let folder = Folder::new("changed");
    let mut store = Store::open(&folder.0, Kept::default()).unwrap();
    let path = save(&mut store, 4).unwrap();
    let whole = || Checkpoint::open(&path).and_then(|checkpoint| checkpoint.verify());
    whole().unwrap();
    // The index is for other programs.
    let names = fs::read_dir(&path).unwrap().map(|e| e.unwrap().path());
    for file in names.filter(|file| !file.ends_with("model.safetensors.index.json")) {
        let bytes = fs::read(&file).unwrap();
        let step = if bytes.len() > 4096 {
            bytes.len() / 64
        } else {
            7
        };
        for at in (0..bytes.len()).step_by(step).chain([bytes.len() - 1]) {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            fs::write(&file, &changed).unwrap();
            assert!(whole().is_err(), "byte {at} of {}", file.display());
            fs::write(&file, &bytes[..at]).unwrap();
            assert!(whole().is_err(), "{at} bytes of {}", file.display());
        }
        fs::remove_file(&file).unwrap();
        assert!(whole().is_err(), "without {}", file.display());
        fs::write(&file, &bytes).unwrap();
        whole().unwrap();
    }
}

#[test]
fn frozen_tensors_are_written_once_and_outlive_their_first_checkpoint() {
    let folder = Folder::new("frozen");
    let kept = Kept {
        last: NonZeroU64::new(2),
        every: None,
    };
    let mut store = Store::open(&folder.0, kept).unwrap();
    let inode = |path: &Path| {
        let file = path.join("frozen-00001-of-00001.safetensors");
        fs::metadata(file).unwrap().ino()
    };
    let first = inode(&save(&mut store, 1).unwrap());
    for step in 2..5 {
        assert_eq!(inode(&save(&mut store, step).unwrap()), first);
    }
    assert_eq!(folder.steps(), [4, 3]);
    drop(store);

    // A later process goes on with the same file.
    let mut store = Store::open(&folder.0, kept).unwrap();
    let checkpoint = Checkpoint::open(&folder.0.join(LATEST)).unwrap();
    // As if the process had been killed before the link was replaced.
    fs::remove_file(folder.0.join(LATEST)).unwrap();
    store.resumed(&checkpoint).unwrap();
    check(&folder.0.join(LATEST), 4);
    let path = save(&mut store, 5).unwrap();
    assert_eq!(inode(&path), first);
    check(&path, 5);

    // If somebody removes the files, one checkpoint fails, and the next one has them again.
    fs::remove_dir_all(&path).unwrap();
    assert!(save(&mut store, 6).is_err() && !store.has_frozen());
    let path = save(&mut store, 7).unwrap();
    assert_ne!(inode(&path), first);
    check(&path, 7);
}

#[test]
fn a_failed_checkpoint_leaves_the_others_and_no_file() {
    let folder = Folder::new("failed");
    let mut store = Store::open(&folder.0, Kept::default()).unwrap();
    save(&mut store, 1).unwrap();
    let failed = store.save(Manifest::default(), &tensors(), &mut |_, _, _| {
        Err(std::io::Error::other("no bytes"))
    });
    assert!(failed.unwrap_err().to_string().contains("no bytes"));
    check(&folder.0.join(LATEST), 1);
    let mut names: Vec<_> = fs::read_dir(&folder.0)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, [".lock", LATEST, "step-00000001"]);
}

#[test]
fn one_process_writes_and_removes_what_killed_ones_left() {
    let folder = Folder::new("locked");
    fs::create_dir_all(folder.0.join(".step-00000007")).unwrap();
    fs::write(folder.0.join(".step-00000007").join("x"), "left").unwrap();
    let store = Store::open(&folder.0, Kept::default()).unwrap();
    assert!(!folder.0.join(".step-00000007").exists());
    let Err(Error::Locked { holder, .. }) = Store::open(&folder.0, Kept::default()) else {
        panic!("two writers");
    };
    assert_eq!(holder, format!(" ({})", std::process::id()));
    drop(store);
    Store::open(&folder.0, Kept::default()).unwrap();
}

#[test]
fn a_damaged_checkpoint_is_replaced_and_counts_for_none() {
    let folder = Folder::new("replaced");
    let kept = Kept {
        last: NonZeroU64::new(2),
        every: None,
    };
    let mut store = Store::open(&folder.0, kept).unwrap();
    save(&mut store, 1).unwrap();
    let path = save(&mut store, 2).unwrap();
    fs::write(path.join(MANIFEST), "{").unwrap();
    save(&mut store, 3).unwrap();
    assert_eq!(folder.steps(), [3, 2, 1]);
    save(&mut store, 2).unwrap();
    check(&path, 2);
}
