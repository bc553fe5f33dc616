//! docs/papers.md is what `make papers` writes. Sections with clocks are left out, and so are those
//! that take long, unless `LIGHTERAGE_LONG_TESTS=1` asks for them.

use lighterage_tests::document::{self, Kind, allocation, backward, estimates};
use lighterage_tests::fsdp::{self, A100, Figures, Memory, Prefetch, Setup};
use papers::estimate::{Shape, peak};
use std::collections::BTreeSet;

const DOC: &str = include_str!("../../docs/papers.md");

#[test]
fn the_page_has_what_the_sections_say() {
    let is_long = std::env::var_os("LIGHTERAGE_LONG_TESTS").is_some();
    let mut compared = 0;
    for section in document::papers().iter().flat_map(|paper| &paper.sections) {
        let title = format!("### {}\n", section.title);
        assert!(DOC.contains(&title), "docs/papers.md should have {title}");
        if section.kind == Kind::Timed || !(section.quick || is_long) {
            continue;
        }
        let text = document::print(section);
        let lacking = text.lines().find(|line| !DOC.contains(line));
        assert!(
            DOC.contains(&text),
            "{} differs from docs/papers.md; `make papers` writes it: {lacking:?}",
            section.name
        );
        compared += 1;
    }
    assert!(compared > 10, "{compared} sections compared");
}

/// The row of LLaMA 7B on four devices with this name.
fn on_four(name: &str) -> Setup {
    let mut rows = backward::rows().into_iter();
    let row = rows.find(|(title, setup, _)| *title == name && setup.devices == 4);
    row.unwrap_or_else(|| panic!("{name}")).1
}

fn steps(setup: &Setup) -> Figures {
    fsdp::run(setup, &A100, 3, 3, 1).expect("the step should fit")
}

/// The order of the post's rows. Retries follow from the requests; with updates in the backward
/// there is none, and with planned memory no call of the system either.
#[test]
fn updates_in_the_backward_never_stall() {
    let [free, limited, during, planned] = [
        "7B, one by one",
        "7B, limit_all_gathers",
        "7B, in the backward",
        "7B, planned memory",
    ]
    .map(|name| steps(&on_four(name)));
    assert!(fsdp::run(&on_four("7B, foreach"), &A100, 3, 3, 1).is_err());
    assert!(free.mean() > limited.mean() && limited.mean() > 2.0 * during.mean());
    assert!(free.retries.iter().all(|&retries| retries > 0));
    assert_eq!(during.retries, [0; 3]);
    // A cache may still grow.
    assert!(100 * during.calls.iter().sum::<usize>() < limited.calls.iter().sum());
    assert_eq!(
        (&planned.retries, &planned.calls),
        (&vec![0; 3], &vec![0; 3])
    );
    assert!(during.deviation() < 0.01 && limited.deviation() > during.deviation());
    // Without the step's end, gradients of all units exist: 4 P / n bytes.
    assert!(during.reserved + 4_000_000_000 < limited.reserved);
    // The limit bounds the bytes of weights in flight: the root, a unit and two before it.
    let layer = 2 * fsdp::LLAMA_7B.layer();
    let root = 2 * (fsdp::LLAMA_7B.parameters() - 32 * fsdp::LLAMA_7B.layer());
    assert!(limited.gathered <= root + 3 * layer && free.gathered > root + 6 * layer);
    // The same seed is the same run.
    assert_eq!(
        steps(&on_four("7B, limit_all_gathers")).seconds,
        limited.seconds
    );
}

#[test]
fn prefetch_is_chosen_as_in_the_post() {
    let chosen = |name| {
        let [pre, post] = [Prefetch::Pre, Prefetch::Post].map(|prefetch| {
            let setup = Setup {
                prefetch,
                ..on_four(name)
            };
            Some(steps(&setup).mean())
        });
        fsdp::choose(pre, post)
    };
    assert_eq!(chosen("7B, limit_all_gathers"), Some(Prefetch::Post));
    assert_eq!(chosen("7B, in the backward"), Some(Prefetch::Pre));
}

/// The plan of the step reserves what its tensors need, to 0.5 %. PRE needs a unit more than POST.
#[test]
fn a_planned_step_of_fsdp_has_no_gaps() {
    let setup = on_four("7B, planned memory");
    assert_eq!(setup.memory, Memory::Planned);
    let pre = backward::planned(&setup);
    assert!(pre.pool as f64 <= 1.005 * pre.tensors as f64);
    let post = backward::planned(&Setup {
        prefetch: Prefetch::Post,
        ..setup
    });
    let layer = 2 * fsdp::LLAMA_7B.layer();
    assert_eq!(pre.gathered - post.gathered, layer);
}

/// Each of the fifteen tensors of the formula is a value of the traced layer, with as many bytes.
/// What the layer saves beyond them is the mean and the deviation of two norms.
#[test]
fn a_traced_layer_saves_what_the_formula_says() {
    let mut saved = estimates::saved(&estimates::block());
    let rows = estimates::block_rows();
    assert_eq!(rows.len(), estimates::BLOCK_VALUES.len());
    for (row, (value, _)) in rows.iter().zip(estimates::BLOCK_VALUES) {
        assert_eq!(
            saved.remove(value),
            Some(row.bytes),
            "{}: {value}",
            row.name
        );
    }
    let Shape {
        width: d,
        heads: a,
        sequence: s,
        batch: b,
        ..
    } = estimates::BLOCK_SHAPE;
    let sum: u64 = rows.iter().map(|row| row.bytes).sum();
    assert_eq!(sum, s * b * (34 * d + 5 * a * s));
    // In bf16, as PyTorch returns them.
    assert_eq!(saved.into_values().collect::<Vec<_>>(), [2 * s * b; 4]);
}

/// The formula of a step's peak is within 1 % of the plan, at each of its three moments.
#[test]
fn estimated_peaks_are_those_of_plans() {
    let mut moments = BTreeSet::new();
    for model in estimates::planned_models() {
        for (optimizer, ours, update, order) in estimates::WAYS {
            let plan = estimates::kept(model.graph.clone(), ours, order) as f64;
            let setup = estimates::formula(&model, optimizer);
            let peak = peak::peak(&setup, update).expect("the setup should have a formula");
            let error = peak.bytes as f64 / plan - 1.0;
            assert!(
                error.abs() < 0.01,
                "{} {}: {error}",
                model.name,
                optimizer.name()
            );
            moments.insert(peak.moment);
        }
    }
    assert_eq!(moments.len(), 3);
}

/// STAlloc, figure 8: at least 97 % of what a mixture's step takes is alive at its peak, though the
/// plan knows no size of an expert's request.
#[test]
fn an_expandable_cache_wastes_little() {
    for letters in ["R", "ZOR"] {
        let (live, taken) = allocation::mixture(letters);
        let efficiency = live as f64 / taken as f64;
        assert!(
            0.97 < efficiency && live <= taken,
            "{letters}: {efficiency}"
        );
    }
}
