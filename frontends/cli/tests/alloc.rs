//! `lighterage alloc`, from a trace to a plan, a check and a picture.

use crate::common::{Folder, run};

/// Four weights, and the activations of six layers, which are allocated and freed like a stack.
fn training() -> String {
    let mut text = "lighterage-trace 1\n".to_string();
    (0..4).for_each(|i| text += &format!("alloc w{i} 1048576\n"));
    text += "phase fwd.0\n";
    (0..6).for_each(|i| text += &format!("alloc a{i} 300000\nalloc t{i} 70000\nfree t{i}\n"));
    text += "phase bwd.0\n";
    (0..6)
        .rev()
        .for_each(|i| text += &format!("alloc g{i} 300000\nfree a{i}\nfree g{i}\n"));
    text + "phase -\n"
}

#[test]
fn a_trace_is_planned_checked_and_drawn() {
    let folder = Folder::new("alloc-plan");
    let trace = folder.write("a.trace", training());
    let (plan, svg) = (folder.file("plan.csv"), folder.file("plan.svg"));
    let json = run(&format!("alloc plan {trace} --json -o {plan} --svg {svg}"))
        .expect(0)
        .json();
    // 1048576 is a multiple of 512; 300000 becomes 300032.
    assert_eq!(json[0]["lower_bound_bytes"], 4 * 1048576 + 7 * 300032);
    assert_eq!(json[0]["buffers"], 22);
    let pool = &json[0]["pools"][0];
    for key in [
        "peak_bytes",
        "lower_bound_bytes",
        "gap",
        "optimal",
        "buffers",
    ] {
        assert_eq!(json[0][key], pool[key], "{key}");
    }
    assert!(pool["ms"].is_number());
    assert_eq!(
        pool["optimal"],
        pool["peak_bytes"] == pool["lower_bound_bytes"]
    );
    let checked = run(&format!("alloc check {trace} {plan} --align 512 --json"))
        .expect(0)
        .json();
    assert_eq!(checked[0]["valid"], true);
    assert!(checked[0]["pools"][0]["peak_bytes"].as_u64() <= pool["peak_bytes"].as_u64());
    let picture = std::fs::read_to_string(svg).unwrap();
    for words in [
        "<svg ",
        "22 blocks",
        "persistent",
        "peak ",
        "w0: 1.00 MiB",
        "</svg>",
    ] {
        assert!(
            picture.contains(words),
            "{words:?} should be in the picture"
        );
    }
    let text = run(&format!("alloc plan {trace}")).expect(0).out;
    for words in ["memory: 22 blocks, checked", "lower bound", "found by"] {
        assert!(text.contains(words), "{words:?} should be in:\n{text}");
    }
    // The plan is a trace too: blocks with fixed addresses.
    let again = run(&format!("alloc plan {plan} --json")).expect(0).json();
    assert_eq!(again[0]["peak_bytes"], json[0]["peak_bytes"]);
}

/// STAlloc's planner makes plans that pass the same check, and reports blocks that it does not
/// support.
#[test]
fn planners_can_be_compared() {
    let folder = Folder::new("alloc-planners");
    let trace = folder.write("a.trace", training());
    let plan = folder.file("plan.csv");
    let json = run(&format!(
        "alloc plan {trace} --planner stalloc --json -o {plan}"
    ))
    .expect(0)
    .json();
    assert_eq!(json[0]["pools"][0]["method"], "stalloc");
    run(&format!("alloc check {trace} {plan} --align 512")).expect(0);
    run(&format!("alloc plan {plan} --planner stalloc"))
        .expect(2)
        .says(&["address is given"]);
}

/// Each method can be left out; without all of them one pass of first fit remains.
#[test]
fn methods_can_be_left_out() {
    let folder = Folder::new("alloc-without");
    let mut table = "id,lower,upper,size\n".to_string();
    for i in 0..60 {
        table += &format!(
            "b{i},{},{},{}\n",
            i * 7 % 40,
            i * 7 % 40 + 1 + i * 5 % 13,
            1 + i * 37 % 90
        );
    }
    let trace = folder.write("a.csv", table);
    let plan = |options: &str| {
        run(&format!("alloc plan {trace} --align 1 --json {options}"))
            .expect(0)
            .json()
    };
    let all = plan("");
    let none = plan("--without sweeps,orders,restarts,best-fit,repair,search");
    assert_eq!(none[0]["pools"][0]["method"], "first fit by size, end");
    assert!(
        all[0]["peak_bytes"].as_u64() < none[0]["peak_bytes"].as_u64(),
        "{all:?} {none:?}"
    );
    for method in [
        "sweeps", "orders", "restarts", "best-fit", "repair", "search",
    ] {
        assert!(
            plan(&format!("--without {method}"))[0]["peak_bytes"].as_u64()
                <= none[0]["peak_bytes"].as_u64()
        );
    }
    run(&format!("alloc plan {trace} --without luck"))
        .expect(2)
        .says(&["luck", "best-fit"]);
}

/// Bytes go from one stream to another after a wait, or with `--share-streams`; blocks may lie in
/// the bytes of others.
#[test]
fn streams_and_operations_in_place() {
    let folder = Folder::new("alloc-streams");
    let text = |wait: &str| {
        format!(
            "lighterage-trace 1\nalloc a 4096\nalloc b 4096 in=a\nfree a\nfree b\n{wait}alloc c \
             4096 stream=1\n"
        )
    };
    let (trace, waits) = (
        folder.write("a.trace", text("")),
        folder.write("b.trace", text("wait 1 0\n")),
    );
    let plan = folder.file("plan.csv");
    let peak = |options: &str| {
        run(&format!("alloc plan {options} --json"))
            .expect(0)
            .json()[0]["peak_bytes"]
            .as_u64()
    };
    assert_eq!(peak(&format!("{trace} -o {plan}")), Some(8192));
    run(&format!("alloc check {trace} {plan}")).expect(0);
    assert_eq!(peak(&waits), Some(4096));
    assert_eq!(peak(&format!("{trace} --planner stalloc")), Some(8192));
    assert_eq!(
        peak(&format!("{trace} --share-streams -o {plan}")),
        Some(4096)
    );
    run(&format!("alloc check {trace} {plan} --share-streams")).expect(0);
    let told = "block c (4096 bytes at 0) gets bytes of block b (4096 bytes at 0) at tick 4, and \
        stream 1 has not waited for 0";
    let refused = run(&format!("alloc check {trace} {plan}")).expect(2);
    assert!(refused.out.contains(told), "{}", refused.out);
    let moved = folder.write(
        "moved.csv",
        "id,lower,upper,size,offset\na,0,2,4096,0\nb,1,3,4096,4096\nc,4,5,4096,8192\n",
    );
    let refused = run(&format!("alloc check {trace} {moved}")).expect(2);
    assert!(
        refused
            .out
            .contains("is not where block a (4096 bytes at 0) is"),
        "{}",
        refused.out
    );
    // In a plan for the allocator, streams may share bytes, because the allocator makes them wait.
    let served = |options: &str| {
        run(&format!("alloc plan {trace} --serve {plan} {options}")).expect(0);
        std::fs::read_to_string(&plan)
            .unwrap()
            .lines()
            .nth(1)
            .unwrap()
            .to_string()
    };
    assert_eq!(
        (served(""), served("--share-streams")),
        ("pool 12288 512".into(), "pool 8192 512".into())
    );
    assert_eq!(
        run(&format!("alloc convert {trace}")).expect(0).out,
        text("") + "free c\n"
    );
}

/// A recorded run of equal steps becomes a plan for one step.
#[test]
fn a_step_is_found_for_the_run_time_allocator() {
    let folder = Folder::new("alloc-serve");
    let steps = (0..8)
        .map(|i| format!("alloc a{i} 65536\nalloc b{i} 1000\nfree b{i}\nfree a{i}\n"))
        .collect::<String>();
    let trace = folder.write(
        "run.trace",
        format!("lighterage-trace 1\nalloc w 4096\n{steps}"),
    );
    let plan = folder.file("run.plan");
    run(&format!("alloc plan {trace} --serve {plan}")).expect(0);
    let text = std::fs::read_to_string(plan).unwrap();
    // The weight is requested once; then the step's two requests follow.
    assert!(text.contains("\nrequests 3 1\n"), "{text}");
    let two = folder.write(
        "two.trace",
        "lighterage-trace 1\npool a\nalloc x 64\npool b\nalloc y 64\n",
    );
    run(&format!(
        "alloc plan {two} --serve {}",
        folder.file("no.plan")
    ))
    .expect(2)
    .says(&["2 pools"]);
}

#[test]
fn a_false_plan_is_refused() {
    let folder = Folder::new("alloc-check");
    let trace = folder.write(
        "a.csv",
        "id,lower,upper,size\na,0,4,100\nb,2,6,100\nc,5,8,100\n",
    );
    let check = |rows: &str, more: &str| {
        let plan = folder.write("plan.csv", format!("id,offset,lower,upper,size\n{rows}"));
        run(&format!("alloc check {trace} {plan} {more}"))
    };
    check(
        "a,0,0,4,100\nb,100,2,6,100\nc,0,5,8,100\n",
        "--capacity 200",
    )
    .expect(0);
    let run = check("a,0,0,4,100\nb,99,2,6,100\nc,0,5,8,100\n", "")
        .expect(2)
        .says(&["refused, 1 fault"]);
    assert!(
        run.out.contains(
            "block a (100 bytes at 0) and block b (100 bytes at 99) overlap from tick 2 on"
        ),
        "{}",
        run.out
    );
    let json = check("a,0,0,4,100\nb,99,2,6,100\nc,0,5,8,100\n", "--json")
        .expect(2)
        .json();
    assert_eq!(
        (&json[0]["valid"], &json[0]["faults"]),
        (&false.into(), &1.into())
    );
    let run = check(
        "a,0,0,4,100\nb,100,2,6,100\nc,0,5,8,100\n",
        "--capacity 199 --align 8",
    )
    .expect(2);
    assert!(
        run.out.contains("not a multiple of 8") && run.out.contains("ends beyond 199"),
        "{}",
        run.out
    );
    check("a,0,0,4,100\nb,100,2,6,100\n", "")
        .expect(2)
        .says(&["plan.csv", "does not place block c"]);
    check("a,0,0,4,100\na,0,0,4,100\n", "")
        .expect(2)
        .says(&["plan.csv", "line 3", "placed twice"]);
    check("a,0,0,4,90\n", "").expect(2).says(&[
        "plan.csv",
        "line 2",
        "size is 90 in the plan and 100",
    ]);
}

#[test]
fn a_pool_that_is_too_small_is_said() {
    let folder = Folder::new("alloc-capacity");
    let trace = folder.write("a.trace", training());
    let plan = folder.file("plan.csv");
    run(&format!("alloc plan {trace} --capacity 6000KiB -o {plan}"))
        .expect(3)
        .says(&["alive at once", "no plan fits"]);
    assert_eq!(folder.names(), ["a.trace"]);
    let json = run(&format!("alloc plan {trace} --capacity 1GiB --json"))
        .expect(0)
        .json();
    assert_eq!(
        (&json[0]["fits"], &json[0]["capacity_bytes"]),
        (&true.into(), &(1u64 << 30).into())
    );
    let json = run(&format!("alloc plan {trace} --capacity 6000KiB --json"))
        .expect(3)
        .json();
    assert_eq!(json[0]["error"], "does not fit");
    run(&format!("alloc plan {trace} --align 48"))
        .expect(2)
        .says(&["power of two"]);
    run(&format!("alloc plan {trace} --align 0"))
        .expect(2)
        .says(&["power of two"]);
    run(&format!("alloc plan {trace} --effort most"))
        .expect(2)
        .says(&["fast", "normal", "max"]);
}

#[test]
fn a_trace_is_described() {
    let folder = Folder::new("alloc-stats");
    // Gradients belong to another stream.
    let trace = folder.write(
        "a.trace",
        training().replace(" 300000\nfree a", " 300000 stream=7\nfree a"),
    );
    let json = run(&format!("alloc stats {trace} --json")).expect(0).json();
    let pool = &json[0]["pools"][0];
    assert_eq!(pool["live_peak_bytes"], 4 * 1048576 + 7 * 300000);
    for (class, n) in [("persistent", 4), ("scoped", 6), ("transient", 12)] {
        assert_eq!(pool["classes"][class]["blocks"], n, "{class}");
    }
    assert_eq!(
        (
            &pool["phases"],
            &pool["streams"],
            &pool["sizes_above_512_bytes"]
        ),
        (&2.into(), &2.into(), &3.into())
    );
    // Two segments of 2 MiB for the weights, which just count as small; one for the rest; one for
    // the other stream.
    assert_eq!(
        pool["caching"]["reserved_bytes"].as_u64().unwrap() % (2 << 20),
        0
    );
    assert!(pool["live_peak_bytes"].as_u64() <= pool["caching"]["reserved_bytes"].as_u64());
    let text = run(&format!("alloc stats {trace}")).expect(0).out;
    for words in ["live peak", "persistent", "PyTorch's", "expandable"] {
        assert!(text.contains(words), "{words:?} should be in:\n{text}");
    }
}

#[test]
fn any_trace_becomes_events() {
    let folder = Folder::new("alloc-convert");
    let table = folder.write(
        "a.csv",
        "id,lower,upper,size,alignment,gaps\na,0,4,100,8,1-2\nb,2,6,100,1,\n",
    );
    let trace = folder.file("a.trace");
    run(&format!("alloc convert {table} -o {trace}")).expect(0);
    let text = run(&format!("alloc convert {trace}")).expect(0).out;
    assert_eq!(text, std::fs::read_to_string(&trace).unwrap());
    assert!(text.contains("alloc a 100 align=8 gaps=1-2"), "{text}");
    // A plan for one is right for the other.
    let plan = folder.file("plan.csv");
    run(&format!("alloc plan {trace} -o {plan}")).expect(0);
    run(&format!("alloc check {table} {plan}")).expect(0);
}

#[test]
fn a_snapshot_is_planned() {
    let folder = Folder::new("alloc-snapshot");
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../trace/tests/data/training.pickle");
    let (snapshot, plan) = (path.display(), folder.file("plan.csv"));
    let json = run(&format!("alloc plan {snapshot} --json -o {plan}"))
        .expect(0)
        .json();
    assert_eq!(json[0]["pools"][0]["pool"], "cuda:0");
    assert!(json[0]["gap"].as_f64().unwrap() <= 0.001);
    run(&format!("alloc check {snapshot} {plan}")).expect(0);
    let json = run(&format!("alloc stats {snapshot} --json"))
        .expect(0)
        .json();
    let replay = &json[0]["pools"][0]["replay"];
    assert_eq!(
        (&replay["requests"], &replay["same_address"]),
        (&1721.into(), &1721.into())
    );
}

/// A generated trace is a trace like any other, and the same options give the same one.
#[test]
fn a_trace_is_generated() {
    let folder = Folder::new("alloc-generate");
    let (trace, plan) = (folder.file("a.trace"), folder.file("plan.csv"));
    let options = "--model qwen1.5-moe --pipeline 8 --expert-parallel 4 --virtual-pipeline 3 \
                   --recompute --steps 2 --evaluate 1 --vary 20 --seed 7";
    let json = run(&format!("alloc generate {options} -o {trace} --json"))
        .expect(0)
        .json();
    let stats = run(&format!("alloc stats {trace} --json")).expect(0).json();
    let pool = &stats[0]["pools"][0];
    for key in ["buffers", "live_peak_bytes", "phases"] {
        assert_eq!(pool[key], json[0][key], "{key}");
    }
    assert_eq!(pool["classes_by"], "phases");
    assert!(pool["dynamic"]["blocks"].as_u64() > Some(1000));
    let again = run(&format!("alloc generate {options}")).expect(0).out;
    assert_eq!(again, std::fs::read_to_string(&trace).unwrap());
    run(&format!("alloc plan {trace} --effort fast -o {plan}")).expect(0);
    run(&format!("alloc check {trace} {plan} --align 512")).expect(0);
    // Held blocks lower an allocator's efficiency, and not what is alive.
    let options = "--model llama2-7b --pipeline 8 --tensor-parallel 2 --micro-batch 4 \
                   --recompute";
    let shares = ["", "--hold-collectives"].map(|hold| {
        run(&format!("alloc generate {options} {hold} -o {trace}")).expect(0);
        let stats = run(&format!("alloc stats {trace} --json")).expect(0).json();
        let pool = &stats[0]["pools"][0];
        let share = pool["expandable"]["efficiency"].as_f64().unwrap();
        (pool["live_peak_bytes"].as_u64().unwrap(), share)
    });
    let [(alive, free), (alive_too, held)] = shares;
    assert_eq!(alive, alive_too);
    assert!(held < 0.95 * free, "{held} {free}");
    let text = run(&format!("alloc generate --model gpt2-345m -o {trace}"))
        .expect(0)
        .out;
    assert!(text.contains("requests in 17 phases"), "{text}");
}

#[test]
fn a_rank_that_cannot_exist_is_an_error() {
    let wrong = |options: &str, words: &[&str]| {
        run(&format!("alloc generate --model qwen2.5-7b {options}"))
            .expect(2)
            .says(words);
    };
    wrong("--pipeline 8", &["28 layers", "1, 2, 4, 7, 14, 28"]);
    wrong("--tensor-parallel 8", &["28 heads", "8 ranks"]);
    wrong("--pipeline 2 --stage 2", &["stage 2"]);
    wrong("--expert-parallel 2", &["no experts"]);
    wrong("--micro-batches 4000000000", &["requests", "fewer"]);
    wrong("--micro-batch 18446744073709551615", &["512 GiB"]);
    wrong("--json", &["--output"]);
    run("alloc generate --model llama9")
        .expect(2)
        .says(&["llama2-7b", "qwen2.5-72b"]);
}

#[test]
fn what_is_wrong_is_said() {
    let folder = Folder::new("alloc-errors");
    let file = folder.write("bad.csv", "id,lower,upper,size\n0,4,4,1\n");
    for command in ["plan", "stats"] {
        run(&format!("alloc {command} {file}"))
            .expect(2)
            .says(&["bad.csv", "line 2", "ends at 4"]);
        run(&format!("alloc {command} /nowhere.csv"))
            .expect(2)
            .says(&["/nowhere.csv"]);
    }
    let fixed = folder.write(
        "fixed.csv",
        "id,lower,upper,size,offset\na,0,4,8,0\nb,2,6,8,512\nc,3,5,600,512\n",
    );
    run(&format!("alloc plan {fixed}"))
        .expect(2)
        .says(&["fixed.csv", "b", "c"]);
    run(&format!("alloc stats {file} --format json"))
        .expect(2)
        .says(&["events", "snapshot"]);
    run(&format!("alloc stats {file} --format lines"))
        .expect(2)
        .says(&["bad.csv", "line 1"]);
    run("alloc plan").expect(2).says(&["TRACE"]);
    run("alloc").expect(2);
}
