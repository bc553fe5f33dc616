//! Users lose no data and do not wait when something goes wrong.

use crate::common::{Folder, floats, mlp, run};
use artifact::{Artifact, Attr, Binding, Command, CommandKind, DType, Initial, Kernel, Line};
use artifact::{MemorySpace, Operand, Place, Pool, State, StateKind, Summary};
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;

/// Batches for the small graph, of one value.
fn batches(folder: &Folder, name: &str, value: f32) -> String {
    let tensors = BTreeMap::from([("batch.0.x", (vec![64, 64], vec![value; 4096]))]);
    folder.write(name, crate::common::tensors(tensors))
}

fn train(batches: &str, rest: &str) -> String {
    let mlp = mlp();
    format!(
        "train {mlp} --optimizer sgd --kernels plain --planner keep --batches {batches} --steps 2 \
         {rest}"
    )
}

#[test]
fn a_finite_file_is_not_replaced_by_nans() {
    let folder = Folder::new("finite");
    let (good, nan) = (
        batches(&folder, "g.st", 0.5),
        batches(&folder, "n.st", f32::NAN),
    );
    let saved = folder.file("s.safetensors");
    run(&train(&good, &format!("--init normal:0.1 --save {saved}"))).expect(0);
    let before = std::fs::read(&saved).unwrap();

    let again = train(&nan, &format!("--init {saved} --save {saved}"));
    run(&again)
        .expect(4)
        .says(&["NaN or infinite values in 2 states", "left as it was"]);
    assert_eq!(std::fs::read(&saved).unwrap(), before);

    let lines = run(&format!("{again} --save-nonfinite --json"))
        .expect(0)
        .json();
    assert_eq!(
        (&lines[0]["loss"], &lines[0]["nonfinite"]),
        (&().into(), &"nan".into())
    );
    assert_eq!(lines[2]["summary"]["first_nonfinite_step"], 1);
    assert!(floats(&saved, "fc1.weight").iter().all(|x| x.is_nan()));

    // If the file is new, the values are saved for inspection.
    let new = folder.file("new.safetensors");
    run(&train(&nan, &format!("--init normal:0.1 --save {new}")))
        .expect(4)
        .says(&["they are in"]);
    assert!(floats(&new, "fc1.weight")[0].is_nan());
}

#[test]
fn what_was_private_stays_private() {
    let folder = Folder::new("private");
    let data = batches(&folder, "b.st", 0.5);
    for (name, args) in [
        ("s.safetensors", train(&data, "--init normal:0.1 --save")),
        ("s.lit", format!("compile {} --kernels plain -o", mlp())),
    ] {
        let path = folder.write(name, "old");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        run(&format!("{args} {path}")).expect(0);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[test]
fn a_pipe_that_nobody_writes_to_is_not_waited_for() {
    let folder = Folder::new("pipe");
    let pipe = folder.file("pipe.st");
    let made = std::process::Command::new("mkfifo")
        .arg(&pipe)
        .status()
        .unwrap();
    assert!(made.success());
    let data = batches(&folder, "b.st", 0.5);
    for args in [
        format!("train {} --batches {pipe} --steps 1", mlp()),
        format!("train {} --batches {data} --init {pipe} --steps 1", mlp()),
        format!("check {pipe}"),
        format!("alloc stats {pipe}"),
        format!("offload solve {pipe}"),
    ] {
        run(&args).expect(2).says(&["not a regular file"]);
    }
}

#[test]
fn batches_may_be_larger_than_memory() {
    let folder = Folder::new("large");
    let header = r#"{"batch.0.x":{"dtype":"F32","shape":[64,64],"data_offsets":[0,16384]},
        "unused":{"dtype":"U8","shape":[1099511627776],"data_offsets":[16384,1099511644160]}}"#;
    let mut start = (header.len() as u64).to_le_bytes().to_vec();
    start.extend_from_slice(header.as_bytes());
    let length = start.len() as u64 + (1 << 40) + 16384;
    let data = folder.write("large.st", start);
    // The disk need not hold it: a sparse file takes no space.
    let file = std::fs::File::options().write(true).open(&data).unwrap();
    file.set_len(length).unwrap();
    run(&train(&data, "--init normal:0.1")).expect(0);

    file.set_len(length - 1).unwrap();
    run(&train(&data, ""))
        .expect(2)
        .says(&["large.st", "not a whole"]);
}

#[test]
fn a_step_that_no_run_can_run_is_not_compiled() {
    let folder = Folder::new("unrunnable");
    let ones = vec!["1"; 17].join(",");
    // More dimensions than kernels support, and numbers next to integers.
    for (file, graph, why) in [
        (
            "rank.ir",
            format!("input %x : f32[{ones}]\n  fwd - %y = neg %x : f32[{ones}]"),
            ["cannot be run", "neg"],
        ),
        (
            "int.ir",
            "input %x : i64[4]\n  fwd - %y = div_scalar %x value=2.0 : i64[4]".into(),
            ["div_scalar", "should be an integer"],
        ),
    ] {
        let graph = folder.write(
            file,
            format!("graph g {{\n  {graph}\n  output y = %y\n}}\n"),
        );
        let lit = folder.file("g.lit");
        run(&format!("compile {graph} --kernels plain -o {lit}"))
            .expect(2)
            .says(&why);
    }
    assert_eq!(folder.names(), ["int.ir", "rank.ir"]);
}

#[test]
fn a_graph_with_updates_gets_no_second_optimizer() {
    let folder = Folder::new("updates");
    let graph = folder.write(
        "u.ir",
        "graph u {\n  input  %g : f32[4]\n  state  param  %w -> %w' : f32[4] \"w\"\n  \
         fwd -  %w' = sub %w, %g : f32[4]\n  output y = %g\n  gradient \"w\" = %g\n}\n",
    );
    run(&format!("plan {graph} --optimizer adamw"))
        .expect(2)
        .says(&["w", "update"]);
}

#[test]
fn huge_numbers_of_an_offloading_problem_are_refused() {
    let folder = Folder::new("offload-max");
    let layer = r#"{"weight_bytes": 1000, "activation_bytes": 10, "forward_micros": 1.0,
        "backward_micros": 2.0, "count": COUNT}"#;
    let problem = |memory: u64, count: u64| {
        let layer = layer.replace("COUNT", &count.to_string());
        let head = format!(r#"{{"link_bytes_per_second": 1e9, "memory_bytes": {memory}"#);
        format!(r#"{head}, "layers": [{layer}]}}"#)
    };
    let max = folder.write("max.json", problem(u64::MAX, 4));
    run(&format!("offload solve {max}"))
        .expect(2)
        .says(&["memory"]);
    let many = folder.write("many.json", problem(1 << 30, 65536));
    run(&format!("offload solve {many}"))
        .expect(2)
        .says(&["layers"]);
}

// --- artifacts that no compiler wrote ---

fn operand(offset: u64, dtype: DType, shape: &[u64]) -> Operand {
    let place = Place { pool: 0, offset };
    let shape = shape.to_vec();
    Operand {
        place,
        dtype,
        shape,
    }
}

fn crafted(bytes: u64) -> Artifact {
    let pool = |name: &str, space, bytes| Pool {
        name: name.into(),
        space,
        bytes,
        lent: false,
    };
    Artifact {
        name: "crafted".into(),
        device: "cpu".into(),
        pools: vec![
            pool("device", MemorySpace::Device(0), bytes),
            pool("host", MemorySpace::Host, 0),
        ],
        streams: vec!["compute".into()],
        summary: Summary {
            planned_peak_bytes: bytes,
            keep_peak_bytes: bytes,
            ..Summary::default()
        },
        ..Artifact::default()
    }
}

fn state(path: &str, operand: Operand) -> State {
    State {
        path: path.into(),
        kind: StateKind::Param,
        operand,
        initial: Initial::Zeros,
    }
}

fn launch(artifact: &mut Artifact, op: &str, attr: (&str, Attr), ins: Vec<Operand>, out: Operand) {
    artifact.kernels.push(Kernel {
        op: op.into(),
        attrs: vec![(attr.0.into(), attr.1)],
        code: None,
    });
    artifact.lines.push(Line {
        name: op.into(),
        why: "run".into(),
    });
    artifact.commands.push(Command {
        stream: 0,
        line: artifact.lines.len() as u32 - 1,
        kind: CommandKind::Launch {
            kernel: artifact.kernels.len() as u32 - 1,
            ins,
            outs: vec![out],
            scratch: None,
        },
    });
}

fn write(folder: &Folder, name: &str, artifact: &Artifact) -> String {
    let path = folder.file(name);
    artifact::write_file(&path, artifact).unwrap();
    path
}

#[test]
fn names_do_not_control_the_terminal() {
    let folder = Folder::new("escape");
    let mut artifact = crafted(128);
    let index = operand(0, DType::I64, &[4]);
    artifact.inputs.push(Binding {
        name: "x".into(),
        operand: index.clone(),
    });
    artifact
        .states
        .push(state("w", operand(64, DType::F32, &[1])));
    artifact.pools[0].bytes = 192;
    artifact.summary.planned_peak_bytes = 192;
    let (table, out) = (
        operand(64, DType::F32, &[1]),
        operand(128, DType::F32, &[4]),
    );
    launch(
        &mut artifact,
        "gather",
        ("dim", Attr::Int(0)),
        vec![table, index],
        out,
    );
    artifact.lines[0].name = "\x1b]0;owned\x07\x1b[2J".into();
    let lit = write(&folder, "e.lit", &artifact);
    let data = safetensors::serialize(
        [(
            "batch.0.x",
            crate::common::view(safetensors::Dtype::I64, vec![4], &[0xff; 32]),
        )],
        None,
    )
    .unwrap();
    let batches = folder.write("b.st", &data);
    let run = run(&format!("train {lit} --batches {batches} --steps 1")).expect(2);
    assert!(
        !run.err.contains('\x1b') && !run.err.contains('\x07'),
        "{:?}",
        run.err
    );
    run.says(&["\\u{1b}]0;owned\\u{7}\\u{1b}[2J failed", "gather"]);
}

#[test]
fn a_state_with_a_name_that_no_reader_finds_is_not_saved() {
    let folder = Folder::new("metadata");
    let mut artifact = crafted(64);
    artifact
        .states
        .push(state("__metadata__", operand(0, DType::F32, &[4])));
    let lit = write(&folder, "m.lit", &artifact);
    let none = folder.write("none.st", crate::common::tensors(BTreeMap::new()));
    let args = format!("train {lit} --batches {none} --steps 1");
    run(&args).expect(0);
    let saved = folder.file("s.safetensors");
    run(&format!("{args} --save {saved}"))
        .expect(2)
        .says(&["__metadata__", "rename it"]);
    assert_eq!(folder.names(), ["m.lit", "none.st"]);
}

#[test]
fn a_file_takes_no_more_memory_than_permitted() {
    let folder = Folder::new("memory");
    let lit = write(&folder, "p.lit", &crafted(1 << 20));
    let none = folder.write("none.st", crate::common::tensors(BTreeMap::new()));
    let args = format!("train {lit} --batches {none} --steps 1 --most-memory");
    run(&format!("{args} 1MiB")).expect(0);
    run(&format!("{args} 1023KiB"))
        .expect(2)
        .says(&["--most-memory", "pools"]);
}

#[test]
fn a_trace_on_a_full_disk_is_the_systems_refusal() {
    let folder = Folder::new("full");
    let data = batches(&folder, "b.st", 0.5);
    run(&train(&data, "--init normal:0.1 --trace /dev/full"))
        .expect(1)
        .says(&["/dev/full"]);
}

#[test]
fn threads_without_cores_are_noted() {
    let folder = Folder::new("threads");
    let data = batches(&folder, "b.st", 0.5);
    let args = train(&data, "--init normal:0.1 --threads 1024");
    run(&args).expect(0).says(&["--threads 1024 on", "slower"]);
}

/// The command under a limit set by the shell.
fn limited(limit: &str, args: &str) -> (i32, String) {
    let program = env!("CARGO_BIN_EXE_lighterage");
    let output = std::process::Command::new("sh")
        .args(["-c", &format!("ulimit {limit}; exec {program} {args}")])
        .output()
        .unwrap();
    // A process that was ended by a signal has no code.
    let code = output.status.code().unwrap_or(-1);
    (code, String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn memory_that_ends_is_no_crash_and_no_bug() {
    let folder = Folder::new("limits");
    let args = format!(
        "compile {} --kernels plain -o {}",
        mlp(),
        folder.file("x.lit")
    );
    let mut refused = 0;
    for megabytes in (16..120).step_by(4) {
        let (code, told) = limited(&format!("-v {}", megabytes << 10), &args);
        // Below some limit the system cannot even load the program. `sh` reports this with 126 or
        // 127, or the kernel kills the process before its first instruction, without a word.
        let killed = code == -1 && told.trim().is_empty();
        let refused_by_shell = matches!(code, 126 | 127) || told.contains("error while loading");
        let loads = !killed && !refused_by_shell;
        if loads {
            assert!(matches!(code, 0 | 1), "{megabytes} MiB: {code}\n{told}");
            refused += i32::from(code == 1);
        }
    }
    assert!(refused > 0, "one of the limits should be too low");
}
