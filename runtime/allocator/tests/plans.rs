//! Plan files: the errors for wrong ones, and that blocks of an accepted one never overlap.

use lighterage_alloc::Plan;
use proptest::prelude::*;

const GOOD: &str = "lighterage-plan 1
pool 4096 512
requests 5 1
space 1536:2000 2048:4096
phase fwd.0
module layers.0.mlp
s 512 0 0 -
s 1000 0 512 3
d 0 0
s 2048 0 2048 6
s 100 0 512 5
end
";

#[test]
fn a_plan_is_read() {
    let plan = Plan::read(GOOD).unwrap();
    assert_eq!(
        (
            plan.bytes(),
            plan.align(),
            plan.requests().len(),
            plan.step()
        ),
        (4096, 512, 5, 1)
    );
    assert_eq!(
        plan.name(lighterage_alloc::plan::Mark::Module, 3),
        Some("layers.0.mlp")
    );
}

/// Each is the good plan with one thing changed.
#[test]
fn wrong_plans_are_refused() {
    let cases = [
        (
            "lighterage-plan 1",
            "lighterage-plan 2",
            "line 1: this program reads version 1",
        ),
        (
            "lighterage-plan 1",
            "PK\u{3}\u{4}",
            "line 1: `lighterage-plan` should stand here",
        ),
        (
            "pool 4096 512",
            "pool 4096 500",
            "line 2: the alignment 500 is no power of two",
        ),
        (
            "pool 4096 512",
            "pool 4096",
            "line 2: `` is not the alignment",
        ),
        (
            "pool 4096 512",
            "pool 2048 512",
            "line 4: the range 2048:4096 is empty, outside the pool",
        ),
        (
            "requests 5 1",
            "requests 5 5",
            "line 3: a step that begins at request 5 of 5",
        ),
        (
            "requests 5 1",
            "requests 4611686018427387903 1",
            "line 3: a step that begins at request 1 of 4611",
        ),
        (
            "requests 5 1",
            "requests 4 1",
            "line 11: more than 4 requests",
        ),
        (
            "requests 5 1",
            "requests 6 1",
            "the plan is cut off: request 5 of 6",
        ),
        (
            "requests 5 1",
            "requests 5 1 1",
            "line 3: `1` is one word too many",
        ),
        (
            "1536:2000 2048",
            "1536:2100 2048",
            "line 4: the range 2048:4096 is",
        ),
        (
            "1536:2000 2048",
            "1536:1536 2048",
            "line 4: the range 1536:1536 is empty",
        ),
        (
            "1536:2000 2048",
            "1024:2000 2048",
            "the space of group 0 meets request 1, which is alive at request 2",
        ),
        (
            "s 512 0 0 -",
            "s 512 0 0 0",
            "line 7: request 0 is freed before one of 1 to 5, and not 0",
        ),
        (
            "s 512 0 0 -",
            "s 512 0 4096 -",
            "line 7: 512 bytes at 4096 are none, or outside the pool",
        ),
        (
            "s 512 0 0 -",
            "s 9223372036854775808 0 0 -",
            "line 7: `9223372036854775808` is not a number of bytes",
        ),
        (
            "s 512 0 0 -",
            "s -1 0 0 -",
            "line 7: `-1` is not a number of bytes",
        ),
        (
            "s 512 0 0 -",
            "s 512 70000 0 -",
            "line 7: a stream's number is below 65536",
        ),
        (
            "s 512 0 0 -",
            "s 512 0 100 -",
            "line 7: the offset 100 is no multiple of 512",
        ),
        ("s 512 0 0 -", "s 513 0 0 -", "requests 0 and 1 share bytes"),
        (
            "s 512 0 0 -",
            "x 512 0 0 -",
            "line 7: `x` begins no line of a plan",
        ),
        (
            "s 1000 0 512 3",
            "s 1000 0 512 5",
            "requests 1 and 4 share bytes",
        ),
        (
            "s 1000 0 512 3",
            "s 1000 0 512 -",
            "line 8: what the step asks for has to be freed",
        ),
        ("d 0 0", "d 1 0", "line 9: group 1 has no `space` line"),
        // The first round's block overlaps only in the second round.
        (
            "s 2048 0 2048 6",
            "s 2048 0 2048 7",
            "the space of group 0 meets request 3, which is alive at request 2",
        ),
        (
            "s 100 0 512 5",
            "s 100 0 512 6",
            "requests 4 and 1 share bytes",
        ),
        ("s 100 0 512 5\n", "", "the plan is cut off: request 4 of 5"),
        ("end\n", "", "the plan is cut off: `end` is missing"),
        (
            "end\n",
            "end\nend\n",
            "line 13: nothing should follow `end`",
        ),
    ];
    for (old, new, message) in cases {
        assert!(GOOD.contains(old), "{old}");
        let error = Plan::read(&GOOD.replace(old, new))
            .expect_err(new)
            .to_string();
        assert!(error.starts_with(message), "{new}: {error}");
    }
    assert_eq!(
        Plan::read("").unwrap_err().to_string(),
        "the plan is cut off: lighterage-plan is missing"
    );
}

/// The bytes of a planned block, and the requests of all rounds in which it lives.
fn alive(plan: &Plan, at: usize) -> Vec<(u64, u64)> {
    use lighterage_alloc::plan::Place;
    let (n, step) = (plan.requests().len(), plan.step() as usize);
    let mut ranges = vec![];
    for round in 0..=at / (n - step) + 1 {
        for (i, request) in plan
            .requests()
            .iter()
            .enumerate()
            .filter(|(i, _)| round == 0 || step <= *i)
        {
            let shift = round * (n - step);
            if let Place::Static { bytes, offset, end } = request.place
                && i + shift <= at
                && end.is_none_or(|end| at < end as usize + shift)
            {
                ranges.push((offset, offset + bytes));
            }
        }
    }
    ranges
}

proptest! {
    /// Damaged files are refused, or are still a plan: no two blocks overlap in four rounds.
    #[test]
    fn damage_does_no_harm(cuts in prop::collection::vec((0usize..200, any::<u8>()), 1..4)) {
        let mut bytes = GOOD.as_bytes().to_vec();
        for (at, byte) in cuts {
            let at = at % bytes.len();
            match byte {
                0..=63 => { bytes.remove(at); }
                64..=127 => bytes.insert(at, b'0' + byte % 10),
                128..=191 => bytes[at] = b'0' + byte % 10,
                _ => bytes[at] = byte,
            }
        }
        if let Ok(text) = String::from_utf8(bytes)
            && let Ok(plan) = Plan::read(&text)
        {
            let n = plan.requests().len();
            for at in 0..4 * n {
                let mut ranges = alive(&plan, at);
                ranges.sort_unstable();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{}: \
                    {:?}", at, ranges);
            }
        }
    }
}
