//! Runs that stop in any way go on from their checkpoints, with the same bits.

use crate::common::{Folder, command, model, run, run_with};
use checkpoint::{Checkpoint, Kept, LATEST, MANIFEST, Store, newest_first};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

/// A compiled step of the small graph, with tensors of 256 bytes, and its five batches.
pub(crate) struct Small {
    pub(crate) folder: Folder,
}

impl Small {
    pub(crate) fn new(name: &str) -> Small {
        let folder = Folder::new(name);
        let text = include_str!("data/mlp.ir");
        let graph = folder.write("m.ir", text.replace("64", "8").replace("4096", "64"));
        let value = |k: usize, i: usize| ((k * 64 + i) as f32 * 0.37).sin();
        let names: Vec<String> = (0..5).map(|k| format!("batch.{k}.x")).collect();
        let batches: BTreeMap<&str, _> = names
            .iter()
            .enumerate()
            .map(|(k, name)| {
                let values = (0..64).map(|i| value(k, i)).collect();
                (name.as_str(), (vec![8, 8], values))
            })
            .collect();
        folder.write("b.st", crate::common::tensors(batches));
        let lit = folder.file("m.lit");
        run(&format!(
            "compile {graph} --optimizer adamw --kernels plain --planner keep -o {lit}"
        ))
        .expect(0);
        Small { folder }
    }

    /// A run that begins, or goes on if the folder has a checkpoint.
    pub(crate) fn train(&self, checkpoints: &str, rest: &str) -> String {
        format!("{} --resume {checkpoints}", self.begin(checkpoints, rest))
    }

    /// A run that begins.
    fn begin(&self, checkpoints: &str, rest: &str) -> String {
        format!(
            "train {} --batches {} --shuffle-data --data-seed 3 --checkpoints {checkpoints} {rest}",
            self.folder.file("m.lit"),
            self.folder.file("b.st"),
        )
    }
}

/// All files of a checkpoint, without the plan's name, by name.
pub(crate) fn contents(checkpoint: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(checkpoint).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        let mut bytes = fs::read(&path).unwrap();
        if name == MANIFEST {
            let text = String::from_utf8(bytes).unwrap();
            let (before, rest) = text.split_once("\"plan\":\"").unwrap();
            let (_, after) = rest.split_once('"').unwrap();
            let (after, _) = after.rsplit_once(",\"crc32\"").unwrap();
            bytes = [before, after].concat().into_bytes();
        }
        (name, bytes)
    });
    files.collect()
}

/// Every checkpoint with a name is whole; returns the step of the newest.
pub(crate) fn newest_of_whole(folder: &str) -> u64 {
    let found = newest_first(Path::new(folder)).unwrap_or_default();
    for (_, path) in &found {
        let checkpoint = Checkpoint::open(path).and_then(|checkpoint| checkpoint.verify());
        checkpoint.unwrap_or_else(|e| panic!("{e}"));
    }
    found.first().map_or(0, |(step, _)| *step)
}

#[test]
fn a_run_goes_on_with_the_same_bits_at_any_budget_and_number_of_threads() {
    // Dropout: random numbers are states too. Micro-batches: the position counts batches.
    let folder = Folder::new("resume");
    let train = |checkpoints: &str, rest: &str| {
        run(&format!(
            "train {} --optimizer adamw --batches {} --shuffle-data --micro-batches 2 --kernels \
             plain --schedule cosine --warmup 2 --schedule-steps 9 --checkpoints {checkpoints} \
             {rest}",
            model("dropout-tiny/joint_core.pt2"),
            model("dropout-tiny/batches.safetensors"),
        ))
    };
    let (whole, parts) = (folder.file("whole"), folder.file("parts"));
    let init = "--init normal:0.02 --seed 5";
    train(&whole, &format!("--steps 6 --planner keep {init}")).expect(0);
    train(
        &parts,
        &format!("--steps 2 --budget 60% --threads 1 {init}"),
    )
    .expect(0);
    let rest = format!("--seed 5 --resume {parts}");
    train(
        &parts,
        &format!("--steps 5 --planner keep --threads 2 {rest}"),
    )
    .expect(0);
    train(
        &parts,
        &format!("--steps 6 --budget 50% --threads 1 {rest}"),
    )
    .expect(0)
    .says(&["goes on from", "after step 5"]);
    let of = |folder: &str| contents(&Path::new(folder).join("step-00000006"));
    assert!(of(&whole) == of(&parts));

    // Metadata and headers: small beside the states, also of this tiny model.
    let checkpoint = Checkpoint::open(&Path::new(&whole).join(LATEST)).unwrap();
    let states: u64 = checkpoint
        .entries()
        .values()
        .map(|entry| entry.bytes())
        .sum();
    let excess = checkpoint.file_bytes() - states;
    assert!(
        excess < 220 * checkpoint.entries().len() as u64 + 2000,
        "{excess}"
    );
}

#[test]
fn other_options_are_named_and_missing_states_are_an_error() {
    let small = Small::new("changed");
    let checkpoints = small.folder.file("c");
    run(&small.begin(&checkpoints, "--init normal:0.1 --steps 4 --save-every 2")).expect(0);

    // A new run does not mix with an old one.
    run(&small.begin(&checkpoints, "--init normal:0.1 --steps 4"))
        .expect(2)
        .says(&["is of an earlier run", "--resume"]);
    run(&small.train(&checkpoints, "--steps 5 --lr 1e-4 --seed 2"))
        .expect(2)
        .says(&[
            "lr",
            "0.001, now 0.0001",
            "seed",
            "0, now 2",
            "--allow-changes",
        ]);
    run(&small.train(&checkpoints, "--steps 5 --lr 1e-4 --allow-changes"))
        .expect(0)
        .says(&["note:", "0.001, now 0.0001"]);

    // The step is compiled with clipping, which changes no state's type.
    let (graph, clipped) = (small.folder.file("m.ir"), small.folder.file("clipped.lit"));
    run(&format!(
        "compile {graph} --optimizer adamw --kernels plain --planner keep --clip-norm 1 \
         -o {clipped}"
    ))
    .expect(0);
    let train = small.train(&checkpoints, "--steps 6 --lr 1e-4");
    let train = train.replace(&small.folder.file("m.lit"), &clipped);
    run(&format!("{train} --allow-changes"))
        .expect(0)
        .says(&["clip-norm", "none, now 1"]);

    // An older one goes on elsewhere only.
    let older = small.folder.file("c/step-00000002");
    let resume = |to: &str| format!("{} --resume {older}", small.begin(to, "--steps 4"));
    run(&resume(&checkpoints)).expect(2).says(&["is later"]);
    run(&resume(&small.folder.file("d"))).expect(0);
    let of = |folder: &str| contents(Path::new(&small.folder.file(folder)));
    assert!(of("c/step-00000004") == of("d/step-00000004"));

    // SGD's states lack moments; AdamW's checkpoint has states that SGD's step lacks.
    let (graph, batches) = (small.folder.file("m.ir"), small.folder.file("b.st"));
    let sgd = format!(
        "train {graph} --optimizer sgd --kernels plain --batches {batches} --shuffle-data \
         --data-seed 3"
    );
    let sgd_checkpoints = small.folder.file("s");
    let init = "--init normal:0.1 --steps 2";
    run(&format!("{sgd} {init} --checkpoints {sgd_checkpoints}")).expect(0);
    run(&small.train(&sgd_checkpoints, "--steps 4"))
        .expect(2)
        .says(&["of another step", "lacks 5 states", "exp_avg.fc1.weight"]);
    run(&format!("{sgd} --steps 9 --resume {checkpoints}"))
        .expect(2)
        .says(&["the step lacks"]);
    run(&small.begin(&checkpoints, "--steps 4 --resume /nowhere"))
        .expect(2)
        .says(&["--resume /nowhere"]);
    let both = format!("--steps 4 --init normal:0.1 --resume {older}");
    run(&small.begin(&checkpoints, &both))
        .expect(2)
        .says(&["--init"]);
}

#[test]
fn damaged_checkpoints_are_skipped_and_written_again() {
    let small = Small::new("skipped");
    let (whole, checkpoints) = (small.folder.file("w"), small.folder.file("c"));
    let init = "--init normal:0.1 --save-every 2";
    run(&small.begin(&whole, &format!("{init} --steps 8"))).expect(0);
    run(&small.begin(&checkpoints, &format!("{init} --steps 6"))).expect(0);
    let damage = |step: &str, file: &str, at: usize| {
        let path = Path::new(&checkpoints).join(step).join(file);
        let mut bytes = fs::read(&path).unwrap();
        let at = at.min(bytes.len() - 1);
        bytes[at] ^= 4;
        fs::write(path, bytes).unwrap();
    };
    damage(
        "step-00000006",
        "training-00001-of-00001.safetensors",
        usize::MAX,
    );
    damage("step-00000004", MANIFEST, 9);
    let verified = run(&format!("checkpoint verify {checkpoints}")).expect(2);
    verified.says_all(&[
        "exp_avg_sq.fc2.weight does not match its checksum",
        MANIFEST,
    ]);

    run(&small.train(&checkpoints, "--steps 8 --save-every 2"))
        .expect(0)
        .says(&[
            "skipped a checkpoint",
            "exp_avg_sq.fc2.weight does not match its checksum",
            "checkpoint.json: its checksum does not match",
            "goes on from",
            "after step 2",
        ]);
    for step in ["step-00000004", "step-00000006", "step-00000008"] {
        let of = |folder: &str| contents(&Path::new(folder).join(step));
        assert!(of(&whole) == of(&checkpoints), "{step}");
    }
    run(&format!("checkpoint verify {checkpoints}")).expect(0);
}

#[test]
fn a_new_run_takes_no_damaged_parameters() {
    let small = Small::new("init-damaged");
    let (checkpoints, other) = (small.folder.file("c"), small.folder.file("d"));
    run(&small.begin(&checkpoints, "--init normal:0.1 --steps 2")).expect(0);
    let from = |path: &str| run(&small.begin(&other, &format!("--init {path} --steps 0")));
    from(&checkpoints)
        .expect(2)
        .says(&["name one of them", "step-00000002"]);

    let step = format!("{checkpoints}/step-00000002");
    let file = format!("{step}/model-00001-of-00001.safetensors");
    // Another file than those of the parameters is not read.
    fs::remove_file(format!("{step}/training-00001-of-00001.safetensors")).unwrap();
    from(&step).expect(0);
    fs::remove_dir_all(&other).unwrap();

    let whole = fs::read(&file).unwrap();
    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 4;
    fs::write(&file, damaged).unwrap();
    for path in [&step, &file] {
        from(path).expect(2).says(&["does not match its checksum"]);
    }

    fs::write(&file, whole).unwrap();
    fs::write(Path::new(&step).join(MANIFEST), "{}").unwrap();
    from(&step).expect(2).says(&[MANIFEST]);
}

#[test]
fn a_wrong_path_is_wrong_input() {
    let small = Small::new("paths");
    let lit = small.folder.file("m.lit");
    for path in ["/dev/full".to_string(), lit.clone(), format!("{lit}/c")] {
        run(&small.begin(&path, "--init normal:0.1 --steps 1"))
            .expect(2)
            .says(&["--checkpoints", "is not a folder"]);
        for command in ["list", "verify"] {
            run(&format!("checkpoint {command} {path}")).expect(2);
        }
    }
    let broken = small.folder.file("broken");
    fs::create_dir(&broken).unwrap();
    small.folder.write("broken/checkpoint.json", [0xff]);
    run(&format!(
        "checkpoint convert {broken} -o {broken}.safetensors"
    ))
    .expect(2)
    .says(&["it is not text"]);
}

#[test]
fn two_runs_do_not_write_to_one_folder() {
    let small = Small::new("writers");
    let checkpoints = small.folder.file("c");
    let store = Store::open(Path::new(&checkpoints), Kept::default()).unwrap();
    let train = small
        .train(&checkpoints, "--init normal:0.1 --steps 2")
        .replace(" --resume", "");
    let train = train.trim_end_matches(&checkpoints).to_string();
    run(&train)
        .expect(2)
        .says(&[&format!("another process ({})", std::process::id())]);
    drop(store);
    run(&train).expect(0);
}

/// Starts a run whose lines can be read.
fn start(args: &str) -> Child {
    let command = command(args);
    // The command leaves signals alone that its parent ignores, as jobs in the background do.
    std::process::Command::new("env")
        .args(["--default-signal=INT,TERM,HUP"])
        .arg(command.get_program())
        .args(command.get_args())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// The shell's built-in kill: a minimal Debian has no other.
fn signal(child: &Child, name: &str) {
    let kill = format!("kill -{name} {}", child.id());
    let status = std::process::Command::new("sh")
        .args(["-c", &kill])
        .status();
    assert!(status.unwrap().success());
}

#[test]
fn a_signal_ends_a_run_after_a_checkpoint() {
    let small = Small::new("signals");
    let mut code = 0;
    for name in ["TERM", "HUP", "INT"] {
        let checkpoints = small.folder.file(name);
        let mut child = start(&small.begin(
            &checkpoints,
            "--init normal:0.1 --steps 100000000 --json --keep-last 1",
        ));
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        lines.next().unwrap().unwrap();
        signal(&child, name);
        let steps = lines.map(|line| {
            let line: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
            line["step"].as_u64()
        });
        let last = steps.flatten().max();
        code = code.max(child.wait().unwrap().code().unwrap());
        // The state after the last step that was told.
        assert_eq!(Some(newest_of_whole(&checkpoints)), last);
    }
    assert_eq!(code, 143);
}

/// Kills runs at random points, with checkpoints every 2 steps, which are written while steps wait,
/// or every 8 steps, which are written while steps go on; each goes on, and the last state has the
/// bits of a run that was not killed.
fn kill_and_go_on(kills: u32) {
    const STEPS: u64 = 60;
    let small = Small::new("kills");
    let whole = small.folder.file("whole");
    let rest = format!("--init normal:0.1 --steps {STEPS} --keep-last 2 --json");
    run(&small.begin(&whole, &format!("{rest} --save-every 2"))).expect(0);
    let expected = contents(&Path::new(&whole).join(LATEST));
    let mut seed = 1_u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % below
    };
    let (mut killed, mut rounds, mut furthest) = (0, 0, 0);
    while killed < kills {
        let checkpoints = small.folder.file("c");
        let _ = fs::remove_dir_all(&checkpoints);
        rounds += 1;
        loop {
            let before = newest_of_whole(&checkpoints);
            let every = [2, 8][random(2) as usize];
            let mode = format!("--save-every {every}");
            // One command begins and goes on.
            let mut child = start(&small.train(&checkpoints, &format!("{rest} {mode}")));
            std::thread::sleep(Duration::from_micros(random(150_000)));
            let _ = child.kill();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let steps = lines.map_while(Result::ok).filter_map(|line| {
                let line: serde_json::Value = serde_json::from_str(&line).ok()?;
                line["loss"].is_number().then(|| line["step"].as_u64())?
            });
            let reached = steps.max().unwrap_or(before);
            let has_ended = child.wait().unwrap().success();
            let newest = newest_of_whole(&checkpoints);
            // One interval, and a quarter of one in which a checkpoint is written.
            assert!(
                newest >= before && newest + every + every / 4 >= reached,
                "step {reached} was told; the newest checkpoint is {newest}, {mode}"
            );
            furthest = furthest.max(reached - newest.min(reached));
            if has_ended {
                break;
            }
            killed += 1;
        }
        assert!(contents(&Path::new(&checkpoints).join(LATEST)) == expected);
    }
    eprintln!("{killed} kills in {rounds} runs; at most {furthest} steps were lost");
}

#[test]
fn a_killed_run_goes_on_from_a_whole_checkpoint_with_the_same_bits() {
    let is_long = std::env::var_os("LIGHTERAGE_LONG_TESTS").is_some_and(|value| value == "1");
    kill_and_go_on(if is_long { 1000 } else { 20 });
}

/// A run that could not read its model leaves no folder, and one that goes on repeats no metrics.
#[test]
fn little_stays_of_what_did_not_happen() {
    let small = Small::new("leftovers");
    let checkpoints = small.folder.file("none");
    let absent = small.folder.file("absent.pt2");
    run(&format!(
        "train {absent} --batches {absent} --checkpoints {checkpoints}"
    ))
    .expect(2);
    assert!(!Path::new(&checkpoints).exists());

    let checkpoints = small.folder.file("c");
    let metrics = small.folder.file("metrics.jsonl");
    let rest = format!("--metrics {metrics} --save-every 2 --steps");
    run(&small.begin(&checkpoints, &format!("--init normal:0.1 {rest} 4"))).expect(0);
    let latest = Path::new(&checkpoints).join("step-00000004");
    fs::remove_dir_all(latest).unwrap();
    run(&small.train(&checkpoints, &format!("{rest} 5"))).expect(0);
    let steps: Vec<u64> = fs::read_to_string(&metrics)
        .unwrap()
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok()?["step"].as_u64())
        .collect();
    assert_eq!(steps, [1, 2, 3, 4, 5]);
}

#[test]
fn frozen_parameters_are_written_once() {
    use std::os::unix::fs::MetadataExt;
    let small = Small::new("frozen");
    let (graph, batches) = (small.folder.file("m.ir"), small.folder.file("b.st"));
    let checkpoints = small.folder.file("c");
    let train = format!(
        "train {graph} --optimizer adamw --kernels plain --batches {batches} --freeze fc1.* \
         --checkpoints {checkpoints} --save-every 1 --keep-last 1"
    );
    run(&format!("{train} --init normal:0.1 --steps 3")).expect(0);
    let frozen = Path::new(&checkpoints).join("latest/frozen-00001-of-00001.safetensors");
    let inode = || fs::metadata(&frozen).unwrap().ino();
    let first = inode();
    run(&format!("{train} --steps 6 --resume {checkpoints}")).expect(0);
    assert_eq!((inode(), newest_of_whole(&checkpoints)), (first, 6));
}

#[test]
fn nans_are_not_checkpoints() {
    let small = Small::new("nans");
    let checkpoints = small.folder.file("c");
    let rest = "--init normal:0.1 --steps 6 --save-every 2";
    run(&small.begin(&checkpoints, &format!("{rest} --lr 1e308 --warmup 5")))
        .expect(4)
        .says(&["NaN or infinite values in", "--save-nonfinite"]);
    assert!(newest_of_whole(&checkpoints) < 6);
    let checkpoints = small.folder.file("d");
    let rest = format!("{rest} --lr 1e308 --warmup 5 --save-nonfinite");
    run(&small.begin(&checkpoints, &rest)).expect(0);
    assert_eq!(newest_of_whole(&checkpoints), 6);
}

/// What loads the shim of disk.c into the command, for files below `folder`.
pub(crate) fn shim(built: &Folder, folder: &str) -> Vec<(&'static str, String)> {
    let library = built.file("disk.so");
    if !Path::new(&library).exists() {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/disk.c");
        // The compiler that links Rust's programs.
        let status = std::process::Command::new("cc")
            .args(["-O1", "-shared", "-fPIC", "-o", &library, source, "-ldl"])
            .status();
        assert!(status.unwrap().success());
    }
    vec![("LD_PRELOAD", library), ("DISK_ROOT", folder.to_string())]
}

fn run_shimmed(args: &str, variables: &[(&'static str, String)]) -> crate::common::Run {
    let variables: Vec<(&str, &str)> = variables.iter().map(|(k, v)| (*k, v.as_str())).collect();
    run_with(args, &variables)
}

#[test]
fn a_disk_that_fails_costs_checkpoints_and_no_training() {
    let small = Small::new("faults");
    let whole = small.folder.file("whole");
    let rest = "--init normal:0.1 --steps 6 --save-every 2 --keep-last 1";
    run(&small.begin(&whole, rest)).expect(0);
    let expected = contents(&Path::new(&whole).join(LATEST));
    let (eio, enospc, erofs) = (5, 28, 30);
    let checkpoints = small.folder.file("c");
    let train = |fault: &str, rest: &str| {
        let _ = fs::remove_dir_all(&checkpoints);
        fs::create_dir(&checkpoints).unwrap();
        let mut variables = shim(&small.folder, &checkpoints);
        variables.push(("DISK_FAULT", fault.to_string()));
        run_shimmed(&small.begin(&checkpoints, rest), &variables)
    };
    // Each call fails once, at each of its positions.
    let mut n_faults = 0;
    for (call, error) in [
        ("open", enospc),
        ("write", enospc),
        ("write", eio),
        ("fsync", eio),
        ("mkdir", enospc),
        ("rename", eio),
        ("symlink", enospc),
        ("unlink", eio),
    ] {
        for position in 1.. {
            let result = train(&format!("{call}:{error}:{position}:1"), rest);
            let is_told = result.err.contains("warning:") || result.code != 0;
            // Only the lock's file is opened before the first step.
            let is_lock = call == "open" && position == 1;
            let code = if is_lock { 1 } else { result.code };
            let result = result.expect(code);
            assert!([0, 1].contains(&code), "{call} {position}: {}", result.err);
            let newest = newest_of_whole(&checkpoints);
            if result.code == 0 {
                assert_eq!(newest, 6, "{call} {position}");
                assert!(contents(&Path::new(&checkpoints).join("step-00000006")) == expected);
            } else {
                assert!(is_lock || result.err.contains("no checkpoint after step 6"));
            }
            // The number of the process that is written into the lock's file is only for messages.
            if !is_told && position > 2 {
                break;
            }
            n_faults += u32::from(is_told);
        }
    }
    assert!(n_faults > 60, "{n_faults}");

    // Writes of half the bytes are no faults.
    train("write:0:1:100000", rest).expect(0);
    assert!(contents(&Path::new(&checkpoints).join(LATEST)) == expected);

    // A disk that stays full: training goes on to its end, or to the user's limit.
    let full = format!("write:{enospc}:14:100000");
    train(&full, rest).expect(1).says(&[
        "warning: no checkpoint after step 4: ",
        "No space left on device",
        "the newest is",
        "step-00000002",
        "error: no checkpoint after step 6 (3 in a row)",
    ]);
    assert_eq!(newest_of_whole(&checkpoints), 2);
    let limited = train(
        &full,
        &format!("{rest} --save-failures 1 --save-sync --json"),
    );
    let limited = limited.expect(1);
    let steps = limited
        .out
        .lines()
        .filter(|line| line.contains("\"loss\""))
        .count();
    assert_eq!(steps, 4, "{}", limited.out);

    // A folder that cannot be written is told before the first step.
    let refused = train(&format!("open:{erofs}:1:100000"), rest).expect(1);
    assert!(refused.err.contains("Read-only file system") && refused.out.is_empty());
}

#[test]
fn a_power_cut_at_any_moment_leaves_the_newest_checkpoint_whole() {
    let small = Small::new("power");
    let checkpoints = small.folder.file("c");
    let log = small.folder.file("log");
    let mut variables = shim(&small.folder, &checkpoints);
    variables.push(("DISK_LOG", log.clone()));
    // The second run goes on from the first one's last checkpoint.
    for steps in [8, 12] {
        let rest = format!("--init normal:0.1 --steps {steps} --save-every 2 --keep-last 2");
        let train = small.train(&checkpoints, &format!("{rest} --keep-every 4"));
        run_shimmed(&train, &variables).expect(0);
    }
    let log = fs::read_to_string(&log).unwrap();
    let cut = small.folder.file("cut");
    crate::power::check_all_prefixes(&log, Path::new(&cut));
}

/// The path of a checkpoint's folder, if it is there.
pub(crate) fn latest(folder: &Path) -> Option<PathBuf> {
    fs::read_link(folder.join(LATEST))
        .ok()
        .map(|name| folder.join(name))
}
