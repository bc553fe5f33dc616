//! Products by cuBLASLt, whose place the stand-in takes: every form of a product, the algorithms
//! that are kept, what is said without the library, and failures.

use super::machine::{Watched, none, standin, threads};
use super::watched::Watch;
use artifact::{Artifact, CommandKind};
use codegen::{Data, Target};
use ir::text::parse_graph;
use lighterage_tests::evaluate::Tensors;
use passes::cost::Roofline;
use passes::devices;
use passes::pipeline::{self, Options};
use runtime::cuda::{
    Addend, Device, DeviceBlock, Driver, Number, Places, Priority, Products, Shape, Staging,
};
use runtime::{CudaOptions, Error, ProductLibrary};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A step of a graph's nodes, for an H100.
pub(super) fn compiled(text: &str) -> Artifact {
    compiled_as(text, false)
}

/// The same; with `tf32`, factors of f32 are rounded.
fn compiled_as(text: &str, tf32: bool) -> Artifact {
    let graph = parse_graph(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let device = devices::named("h100").unwrap();
    let cost = Roofline::new(&device);
    let options = Options {
        tf32,
        ..Options::default()
    };
    let compiled = pipeline::compile(graph, &options, &device, &cost, &mut |_| ()).unwrap();
    codegen::emit(&compiled, &Data::new(), Some(Target::SM_90)).unwrap()
}

/// Products of every form: transposed factors, batches, types, addends. The text, and their number.
fn forms() -> (String, usize) {
    let (mut inputs, mut nodes, mut outputs, mut n) = (vec![], vec![], vec![], 0);
    let [m, k, n_columns] = [5_u64, 19, 11];
    let mut add = |op: &str, types: [String; 2], lead: &str, flags: [bool; 2], addend: &str| {
        let [of, result] = types;
        let [ta, tb] = flags;
        let x = if ta {
            format!("{k},{m}")
        } else {
            format!("{m},{k}")
        };
        let w = if tb {
            format!("{n_columns},{k}")
        } else {
            format!("{k},{n_columns}")
        };
        inputs.push(format!("  input %x{n} : {of}[{lead}{x}]"));
        inputs.push(format!("  input %w{n} : {of}[{lead}{w}]"));
        let operands = match (op, addend) {
            (_, "") => format!("%x{n}, %w{n}"),
            ("addmm", _) => format!("%c{n}, %x{n}, %w{n}"),
            _ => format!("%x{n}, %w{n}, %c{n}"),
        };
        if !addend.is_empty() {
            inputs.push(format!("  input %c{n} : {result}[{addend}]"));
        }
        let ty = format!("{result}[{lead}{m},{n_columns}]");
        nodes.push(format!(
            "  fwd - %y{n} = {op} {operands} ta={ta} tb={tb} : {ty}"
        ));
        outputs.push(format!("  output y{n} = %y{n}"));
        n += 1;
    };
    for flags in [[false, false], [true, false], [false, true], [true, true]] {
        let (f32s, halves) = (["f32"; 2].map(String::from), ["bf16"; 2].map(String::from));
        let sums = ["bf16", "f32"].map(String::from);
        for types in [f32s, halves] {
            add("matmul", types.clone(), "", flags, "");
            add("matmul", types.clone(), "3,", flags, "");
            add("addmm", types.clone(), "", flags, "11");
            add("addmm", types, "", flags, "5,11");
        }
        add("matmul_sum", sums.clone(), "", flags, "");
        add("matmul_sum", sums, "", flags, "5,11");
    }
    let lines = [inputs, nodes, outputs].concat().join("\n");
    (format!("graph forms {{\n{lines}\n}}"), n)
}

/// Numbers between -1 and 1 for each input.
pub(super) fn feed(artifact: &Artifact) -> Tensors {
    let mut seed = 1_u32;
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let inputs = artifact.inputs.iter().map(|input| {
        let n = input.operand.shape.iter().product::<u64>();
        let bytes = (0..n).flat_map(|_| {
            let bits = next().to_bits();
            match input.operand.dtype {
                artifact::DType::F32 => bits.to_le_bytes().to_vec(),
                _ => ((bits >> 16) as u16).to_le_bytes().to_vec(),
            }
        });
        (input.name.clone(), bytes.collect())
    });
    inputs.collect()
}

/// Options with the stand-in as cuBLASLt.
pub(super) fn library(watch: &Watch) -> CudaOptions {
    CudaOptions {
        products: ProductLibrary::At(watch.standin.path().into()),
        ..CudaOptions::default()
    }
}

/// A step's outputs.
pub(super) fn run(
    watch: &Arc<Watch>,
    artifact: &Artifact,
    cuda: CudaOptions,
) -> Result<Tensors, Error> {
    let mut watched = Watched::with(watch, artifact, threads(), cuda)?;
    watched.write(&feed(artifact))?;
    watched.launch()?;
    watched.machine.wait()?;
    watched.read()
}

#[test]
fn every_form_of_a_product_is_the_librarys() {
    let (text, n) = forms();
    let artifact = compiled(&text);
    let watch = Watch::new(&standin(1));
    let theirs = run(&watch, &artifact, library(&watch)).unwrap();
    assert_eq!(watch.standin.findings(), none());
    assert_eq!(watch.standin.calls_of("cublasLtMatmul"), n as u64);

    let watch = Watch::new(&standin(2));
    let ours = run(&watch, &artifact, CudaOptions::default()).unwrap();
    assert_eq!(watch.standin.calls_of("cublasLtMatmul"), 0);
    assert_eq!(far(&artifact, &theirs, &ours), None);
}

/// Products by TF32: the library and the step's own kernels round the same factors, and results
/// differ from those of f32.
#[test]
fn tf32_is_for_the_library_too() {
    let (text, n) = forms();
    let exact = compiled(&text);
    let rounded = compiled_as(&text, true);
    assert!(rounded.tf32 && !exact.tf32);
    let watch = Watch::new(&standin(1));
    let cuda = CudaOptions {
        tf32: true,
        ..library(&watch)
    };
    let theirs = run(&watch, &rounded, cuda).unwrap();
    assert_eq!(watch.standin.findings(), none());
    assert_eq!(watch.standin.calls_of("cublasLtMatmul"), n as u64);
    let run_own = |seed, artifact| {
        let watch = Watch::new(&standin(seed));
        let ours = run(&watch, artifact, CudaOptions::default()).unwrap();
        assert_eq!(watch.standin.findings(), none());
        ours
    };
    let ours = run_own(2, &rounded);
    assert_eq!(far(&rounded, &theirs, &ours), None);
    assert!(far(&exact, &run_own(3, &exact), &ours).is_some());
}

/// A number of two runs' outputs that differs by more than rounding.
fn far(artifact: &Artifact, theirs: &Tensors, ours: &Tensors) -> Option<String> {
    for output in &artifact.outputs {
        let (is_half, name) = (output.operand.dtype == artifact::DType::BF16, &output.name);
        let numbers = |bytes: &[u8]| -> Vec<f32> {
            match is_half {
                true => {
                    let (all, _) = bytes.as_chunks::<2>();
                    let wide = |&b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16);
                    all.iter().map(wide).collect()
                }
                false => {
                    let (all, _) = bytes.as_chunks::<4>();
                    all.iter().map(|&b| f32::from_le_bytes(b)).collect()
                }
            }
        };
        let (theirs, ours) = (numbers(&theirs[name]), numbers(&ours[name]));
        assert!(ours.iter().any(|x| x.abs() > 1.0), "{name}: {ours:?}");
        for (theirs, ours) in theirs.iter().zip(&ours) {
            // One step of the type, and rounding errors of terms that cancel.
            let near = ours.abs() * if is_half { 1.0 / 128.0 } else { 1e-6 } + 3e-6;
            if (theirs - ours).abs() > near {
                return Some(format!("{name}: {theirs}, not {ours}"));
            }
        }
    }
    None
}

fn temporary(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("lighterage-{name}-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

/// Algorithms are chosen once: the next run takes them from the file, unless the library is
/// another one, or the file is damaged.
#[test]
fn algorithms_are_kept_in_a_file() {
    const ASK: &str = "cublasLtMatmulAlgoGetHeuristic";
    let artifact = compiled(&forms().0);
    let file = temporary("algorithms");
    let with_file = |options: &standin::Options| {
        let watch = Watch::new(options);
        let cuda = CudaOptions {
            algorithms: Some(file.clone()),
            ..library(&watch)
        };
        let left = run(&watch, &artifact, cuda).unwrap();
        assert_eq!(watch.standin.findings(), none());
        (left, watch.standin.calls_of(ASK))
    };
    let (first, asked) = with_file(&standin(1));
    assert!(asked > 0);
    let kept = std::fs::read_to_string(&file).unwrap();
    assert!(kept.starts_with("cublaslt 130100 stand-in\n"), "{kept}");
    assert_eq!(with_file(&standin(2)), (first.clone(), 0));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), kept);

    let newer = standin::Options {
        cublaslt: 130_200,
        ..standin(3)
    };
    let (again, asked_again) = with_file(&newer);
    assert_eq!((&again, asked_again), (&first, asked));
    let kept = std::fs::read_to_string(&file).unwrap();
    assert!(kept.starts_with("cublaslt 130200 stand-in\n"), "{kept}");

    // An algorithm that the library does not take is chosen again, as is one that is cut off.
    let mut lines: Vec<&str> = kept.lines().collect();
    let damaged = lines[1].replace("4c49474854455241", "4c49474854455242");
    assert_ne!(damaged, lines[1]);
    lines[1] = &damaged;
    lines[2] = &lines[2][..40];
    std::fs::write(&file, lines.join("\n")).unwrap();
    let (again, asked_again) = with_file(&newer);
    assert_eq!((again, asked_again), (first, 2));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), kept);
    std::fs::remove_file(&file).unwrap();
}

/// A library that is named must be there, and must be new enough.
#[test]
fn a_missing_or_old_library_is_an_error_if_it_is_named() {
    let artifact = compiled(&forms().0);
    let watch = Watch::new(&standin::Options {
        cublaslt: 110_800,
        ..standin(1)
    });
    let named = |path: &Path| CudaOptions {
        products: ProductLibrary::At(path.into()),
        ..CudaOptions::default()
    };
    let missing = Path::new("/nowhere/libcublasLt.so.13");
    for (cuda, says) in [
        (named(missing), "/nowhere/libcublasLt.so.13: "),
        (
            library(&watch),
            "is version 110800; at least 120000 is needed",
        ),
        (
            named(Path::new("libc.so.6")),
            "has no function cublasLtGetVersion",
        ),
    ] {
        let error = run(&watch, &artifact, cuda).unwrap_err();
        let Error::Unsupported(why) = &error else {
            panic!("{error:?}");
        };
        let is_clear = why.contains(says) && why.contains("LIGHTERAGE_CUBLASLT=0");
        assert!(is_clear, "{why}");
    }
}

/// The machine says which library computes how many products.
#[test]
fn a_machine_says_what_computes_products() {
    let (text, n) = forms();
    let (artifact, watch) = (compiled(&text), Watch::new(&standin(1)));
    let watched = Watched::with(&watch, &artifact, threads(), library(&watch)).unwrap();
    let [note] = watched.machine.notes() else {
        panic!("{:?}", watched.machine.notes());
    };
    let said = format!("computes {n} of {n} products");
    assert!(
        note.starts_with("cuBLASLt 130100 of ") && note.ends_with(&said),
        "{note}"
    );
}

/// Each call fails in turn, for good: an error and no panic, and nothing is called afterwards.
#[test]
fn each_call_fails_in_turn() {
    let text = "graph g {\n  input %x : bf16[8,8]\n  input %w : bf16[8,8]\n  fwd - %y = matmul %x, \
                %w ta=false tb=false : bf16[8,8]\n  output y = %y\n}";
    let artifact = compiled(text);
    let watch = Watch::new(&standin(1));
    run(&watch, &artifact, library(&watch)).unwrap();
    let calls = watch.standin.facts().calls;
    let (mut of_library, mut failed) = (0, 0);
    for fail_at in 1..calls {
        let watch = Watch::new(&standin::Options {
            fail_at,
            fail_with: 700,
            ..standin(1)
        });
        if let Err(error) = run(&watch, &artifact, library(&watch)) {
            failed += 1;
            of_library += usize::from(error.to_string().contains("cublasLt"));
        }
    }
    // Its handle and its product.
    assert_eq!(of_library, 2);
    assert!(failed + 10 > calls as usize / 2, "{failed} of {calls}");
}

/// A large product has a workspace in its plan, and a small one has none.
#[test]
fn a_workspace_is_in_the_plan() {
    let of = |n: u64| {
        let artifact = compiled(&format!(
            "graph g {{\n  input %x : bf16[{n},{n}]\n  input %w : bf16[{n},{n}]\n  fwd - %y = \
             matmul %x, %w ta=false tb=false : bf16[{n},{n}]\n  output y = %y\n}}"
        ));
        runtime::validate(&artifact).unwrap();
        artifact
            .commands
            .iter()
            .find_map(|command| match command.kind {
                CommandKind::Launch { scratch, .. } => Some(scratch.map(|range| range.bytes)),
                _ => None,
            })
    };
    assert_eq!(of(64), Some(None));
    assert_eq!(of(1024), Some(Some((32 << 20) + 192)));
}

/// A product uses the aligned part of its workspace, and the algorithm that is known.
#[test]
fn a_product_keeps_to_its_workspace() {
    let watch = Watch::new(&standin(1));
    let driver = Driver::open(Some(watch.standin.path())).unwrap();
    let device = Device::new(driver, 0).unwrap();
    let library = Products::open(&device, watch.standin.path()).unwrap();
    let block = DeviceBlock::new(&device, 1 << 14).unwrap();
    let stream = device.stream(Priority::Usual).unwrap();
    let mut staging = Staging::new(&device, 1 << 12).unwrap();
    let at = |offset: u64| block.range(offset, 64).address();
    let ones: Vec<u8> = (0..64).flat_map(|_| 1_f32.to_le_bytes()).collect();
    for offset in [0, 256] {
        staging.write(block.range(offset, 256), &ones).unwrap();
    }
    let shape = Shape {
        batch: 1,
        m: 4,
        n: 4,
        k: 16,
        ta: false,
        tb: true,
        tf32: false,
        factors: Number::F32,
        result: Number::F32,
        addend: Addend::Nothing,
        workspace: 4096,
    };
    let places = Places {
        left: at(0),
        right: at(256),
        addend: 0,
        result: at(512),
    };
    let workspace = Some(block.range(1024 + 64, 4096));
    let product = library
        .product(&shape, places, workspace, None)
        .unwrap()
        .unwrap();
    stream.multiply(&product).unwrap();
    stream.synchronize().unwrap();
    let mut bytes = [0; 64];
    staging.read(block.range(512, 64), &mut bytes).unwrap();
    assert!(
        bytes.chunks(4).all(|x| x == 16_f32.to_le_bytes()),
        "{bytes:?}"
    );

    // The same algorithm is taken again; with too small a workspace another one is chosen.
    let known = Some(*product.algorithm());
    let again = library
        .product(&shape, places, workspace, known)
        .unwrap()
        .unwrap();
    assert_eq!(again.algorithm(), product.algorithm());
    let small = Some(block.range(1024, 512));
    let other = library
        .product(&shape, places, small, known)
        .unwrap()
        .unwrap();
    assert_ne!(other.algorithm(), product.algorithm());
    assert_eq!(watch.standin.findings(), none());
}
