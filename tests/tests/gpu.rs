//! Runs the cases of `benches/gpu_kernels.py` by the interpreter of PTX: generated GPU kernels give
//! the same results as the kernels for the processor, with any number of blocks and in place. The
//! script can read the folder.

use codegen::kernels::{Generated, Target, Unsupported};
use ir::op::{Access, Attr};
use ir::{DType, Op, TensorType};
use lighterage_tests::example;
use lighterage_tests::gpu::{Case, cases, timed, write};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Every case, for an H100.
fn all() -> &'static [Case] {
    static ALL: OnceLock<Vec<Case>> = OnceLock::new();
    ALL.get_or_init(|| cases(&Target::SM_90))
}

/// The errors of a case.
fn wrong(case: &Case) -> Vec<String> {
    let found = match case.interpret(None, None) {
        Ok(found) => found,
        Err(e) => return vec![e.to_string()],
    };
    let mut wrong = case.compare(&found);
    let mut same = |how: String, again: Result<Vec<Vec<u8>>, ptx::Error>| match again {
        Ok(again) if again == found => {}
        Ok(_) => wrong.push(format!("other bits {how}")),
        Err(e) => wrong.push(format!("{how}: {e}")),
    };
    if case.any_blocks {
        let most = case
            .launches
            .iter()
            .map(|launch| launch.blocks)
            .max()
            .unwrap_or(1);
        same(
            "by fewer blocks".into(),
            case.interpret(Some(most.div_ceil(3)), None),
        );
    }
    if let Some(&pair) = case.inplace.last() {
        same(
            format!("with {pair:?} in place"),
            case.interpret(None, Some(pair)),
        );
    }
    wrong
}

#[test]
fn kernels_compute_on_a_gpu_what_they_do_here() {
    let cases = all();
    let n = std::thread::available_parallelism().map_or(1, usize::from);
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let share = |first: usize| {
            let mine = cases.iter().skip(first).step_by(n);
            mine.flat_map(|case| {
                wrong(case)
                    .into_iter()
                    .map(|what| format!("{}: {what}", case.name))
            })
            .collect()
        };
        let workers: Vec<_> = (0..n)
            .map(|first| scope.spawn(move || -> Vec<String> { share(first) }))
            .collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().unwrap())
            .collect()
    });
    assert!(
        wrong.is_empty(),
        "{} of {} cases:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
    assert!(250 < cases.len());
}

/// Every op has a kernel for GPUs: made from instructions, or written in `codegen/src/device`.
#[test]
fn every_op_has_a_kernel_for_gpus() {
    let first_word = |case: &'static Case| case.name.split(' ').next().unwrap();
    let compared: BTreeSet<&str> = all().iter().map(first_word).collect();
    for kind in example::ops_that(|op| op.facts().has_kernel) {
        let name = kind.name();
        let facts = kind.facts();
        let is_whole = facts.access == Access::Whole;
        // There is no polynomial of f64 for a function.
        let is_function = facts.is_function && facts.access == Access::Element;
        assert!(
            !is_whole || compared.contains(name),
            "codegen/src/device has no kernel for {name}, or tests/src/gpu_ops.rs has no case"
        );
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            let shapes: [&[u64]; 3] = [&[2, 3, 4, 5], &[3, 4, 4], &[4, 4]];
            let found = shapes.iter().find_map(|shape| {
                let x = TensorType::new(dtype, *shape).unwrap();
                example::example(kind, &x)
            });
            let Some((op, types)) = found else {
                assert!(
                    compared.contains(name),
                    "tests/src/gpu_ops.rs has no case for {name}"
                );
                continue;
            };
            let has_none = dtype == DType::F64 && is_function;
            for op in example::along_each_dimension(op, &types) {
                let why = on_a_gpu(&op, &types).err().map(|why| why.to_string());
                assert_eq!(why.is_some(), has_none, "{op:?} of {types:?}: {why:?}");
            }
        }
    }
}

/// The kernel of an op on a GPU, with the scratch that it has there.
fn on_a_gpu(op: &Op, types: &[TensorType]) -> Result<Generated, Unsupported> {
    let operands: Vec<&TensorType> = types.iter().collect();
    let results = op.infer(&operands).unwrap();
    let scratch = op.work(&operands, &results).scratch.gpu;
    codegen::kernel(op, types, &Target::SM_90, scratch)
}

#[test]
fn a_kernel_has_no_more_arguments_than_a_gpu_takes() {
    let attrs = [
        ("dtype", Attr::Type(DType::F32)),
        ("max_norm", Attr::Float(1.0)),
    ];
    let norm = Op::new("clip_scale", attrs).unwrap();
    let sums = vec![TensorType::new(DType::F64, []).unwrap(); 300];
    let few = codegen::kernel(&norm, &sums[..200], &Target::SM_90, 0);
    let many = codegen::kernel(&norm, &sums, &Target::SM_90, 0);
    assert!(few.is_ok() && many.unwrap_err().to_string().contains("256 operands"));
}

/// Ends that are out of range are those in range that are nearest, and no access is out of bounds.
#[test]
fn ends_of_groups_need_not_be_in_range() {
    for (name, starts) in [
        ("grouped_matmul tb=false of f32[75,19]", "of rows"),
        (
            "grouped_matmul tb=false of bf16[75,72]",
            "of rows, by tensor cores",
        ),
        ("grouped_outer of f32[75,19]", "of terms"),
        ("grouped_outer of bf16[75,72]", "of terms, by tensor cores"),
    ] {
        let case = all().iter().find(|case| case.name.starts_with(name));
        let case = case.unwrap_or_else(|| panic!("no case {starts}: {name}"));
        let with = |ends: [i64; 4]| {
            let mut case = case.clone();
            case.operands[2].bytes = Some(ends.iter().flat_map(|end| end.to_le_bytes()).collect());
            case.interpret(None, None)
                .unwrap_or_else(|e| panic!("{name}: {e}"))
        };
        let wild = with([i64::MIN, 3, -1, i64::MAX]);
        assert!(wild == with([0, 3, 3, 75]), "{name}");
        assert!(wild != with([0, 4, 4, 75]), "{name}");
    }
}

/// A changed instruction, a changed bit of an operand, a missing block: each is detected.
#[test]
fn what_is_wrong_is_found() {
    let gelu = all()
        .iter()
        .find(|case| case.name.starts_with("gelu tanh=true of f32"))
        .unwrap();
    assert_eq!(wrong(gelu), Vec::<String>::new());
    let mutant = |change: &dyn Fn(&mut Case)| {
        let mut case = gelu.clone();
        change(&mut case);
        wrong(&case)
    };
    assert!(
        !mutant(&|case| case.ptx = case.ptx.replacen("add.rn.f32", "sub.rn.f32", 1)).is_empty()
    );
    assert!(!mutant(&|case| case.ptx = case.ptx.replacen("st.global", "st.shared", 1)).is_empty());
    assert!(!mutant(&|case| case.operands[0].bytes.as_mut().unwrap()[3] ^= 0x80).is_empty());
    assert!(!mutant(&|case| case.launches.clear()).is_empty());
}

/// Runs the script; without Python, none, and a line that says why.
fn script(args: &[&str]) -> Option<(Option<i32>, String)> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/gpu_kernels.py");
    let out = Command::new("python3").arg(script).args(args).output();
    let out = out
        .map_err(|e| eprintln!("skipped: python3 does not start: {e}"))
        .ok()?;
    let said = [out.stdout, out.stderr].concat();
    Some((
        out.status.code(),
        String::from_utf8_lossy(&said).into_owned(),
    ))
}

#[test]
fn the_script_reads_what_is_written_for_it() {
    let folder =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("gpu{}", std::process::id()));
    let (cases, timed) = (all(), timed(&Target::SM_90));
    write(&folder, &Target::SM_90, cases, &timed).unwrap();
    let data = folder.join("kernels.bin");
    let bytes = std::fs::read(&data).unwrap();
    let n_bytes = bytes.len() as u64
        + std::fs::metadata(folder.join("kernels.json"))
            .unwrap()
            .len();
    // They travel compressed, as less than half: scripts/gpu.sh.
    assert!(n_bytes < 48 << 20, "{n_bytes} bytes");
    let path = folder.to_str().unwrap();
    if let Some((code, said)) = script(&[path, "--dry-run"]) {
        assert_eq!(code, Some(0), "{said}");
        assert!(
            said.contains(&format!(
                "{} cases to compare, {} to time",
                cases.len(),
                timed.len()
            )),
            "{said}"
        );
        // With a GPU, everything must be right on it; without one, the script says so.
        let (code, said) = script(&[path]).unwrap();
        assert!(
            code == Some(0) || (code == Some(2) && said.starts_with("gpu_kernels: ")),
            "{said}"
        );
        eprintln!("{said}");
        std::fs::write(&data, &bytes[..bytes.len() - 1]).unwrap();
        let zip = ["-m", "gzip", data.to_str().unwrap()];
        let zipped = Command::new("python3").args(zip).status().unwrap();
        assert!(zipped.success());
        std::fs::remove_file(&data).unwrap();
        let (code, said) = script(&[path, "--dry-run"]).unwrap();
        assert!(
            code == Some(2) && said.contains("does not have all of"),
            "{said}"
        );
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
