//! Weight offloading: table 1, figure 4, theorem 1.

use super::{Kind, Paper, Section};
use papers::offload::exact;
use papers::offload::paper::{table_1, table_of_figure_4};
use papers::table::Table;

pub(super) fn paper() -> Paper {
    Paper {
        title: "Weight offloading (Beaumont et al., 2022)",
        about: "The paper states neither weights nor memories. Both are reconstructed from its \
                Table 1: [offload.md](offload.md#figures).",
        sections: vec![
            Section {
                name: "offload-table1",
                title: "Table 1: a step in ms, with six blocks more than the least memory",
                kind: Kind::Simulated,
                command: Some("lighterage offload table1"),
                body: || first_table(6.0),
                differs: "The columns `sum of u`, `bound` and `l2l` are the paper's to the \
                          millisecond. `greedy` pauses for two blocks' transfers in each row, the \
                          paper's for one to seven: its memories are unknown. `greedy+` needs no \
                          pause.",
                quick: false,
            },
            Section {
                name: "offload-table1-tight",
                title: "Table 1 with 1.1 blocks more than the least memory",
                kind: Kind::Simulated,
                command: Some("lighterage offload table1 --blocks 1.1"),
                body: || first_table(1.1),
                differs: "Almost no memory is left. `greedy+` still needs no pause; the others do.",
                quick: false,
            },
            Section {
                name: "offload-figure4",
                title: "Figure 4: overhead of a step in percent, GPT-2 with 36 blocks",
                kind: Kind::Simulated,
                command: Some("lighterage offload figure4"),
                body: || {
                    table_of_figure_4()
                        .expect("the chains should have schedules")
                        .markdown()
                },
                differs: "As in the paper, the bound has no pause from 4 GB/s on, L2L is the \
                          slowest, and `greedy*` is never faster than `greedy`. Two things differ. \
                          In the paper `greedy*` has up to five times the pauses of `greedy`; \
                          here up to 1.7 times, and 2.7 times at any memory from 3.6 to 24 GB. And \
                          in the paper `greedy` is close to the bound; here it is not at low \
                          bandwidths, at none of these memories. Algorithm 1, as the paper words \
                          it, prefers layers that leave in both gaps, at half the price. If \
                          a layer near the start is chosen for the second gap, it comes back after \
                          the few operations of the layers before it. The smallest case: with \
                          16.5 GB at 0.5 GB/s and batch 64, layer 2 does so, and all pauses \
                          (4.5 % of the step) are those for its copies and layer 1's. \
                          AutoSwap's priorities, which have no such discount, are often better. \
                          `greedy+` stays within 0.4 % of the bound.",
                quick: false,
            },
            Section {
                name: "offload-theorem1",
                title: "Theorem 1: chains from 3-partition",
                kind: Kind::Computed,
                command: None,
                body: theorem,
                differs: "A step without a pause exists if and only if the numbers have a \
                          3-partition: exhaustive search agrees.",
                quick: true,
            },
        ],
    }
}

fn first_table(blocks: f64) -> String {
    table_1(blocks)
        .expect("the chains should have schedules")
        .markdown()
}

/// The most states that the search visits.
const MOST_STATES: usize = 1 << 20;

fn theorem() -> String {
    let mut table = Table::new(["numbers", "has a 3-partition", "step without a pause"]);
    for numbers in [
        [4, 4, 5, 4, 4, 5],
        [5, 5, 6, 5, 5, 6],
        [4, 4, 4, 4, 4, 6],
        [5, 5, 5, 5, 5, 7],
    ] {
        let sum: u64 = numbers.iter().sum();
        // With six numbers, one triple of half the sum leaves another.
        let triples = (0..1u32 << 6).filter(|set| set.count_ones() == 3);
        let part = |set: u32| -> u64 {
            let taken = (0..6).filter(|k| set >> k & 1 == 1);
            taken.map(|k| numbers[k]).sum()
        };
        let splits = triples.into_iter().any(|set| 2 * part(set) == sum);
        let instance = exact::three_partition(&numbers).expect("six numbers of an even sum");
        let step = exact::without_pause(&instance, MOST_STATES);
        let word = |yes: bool| if yes { "yes" } else { "no" }.to_string();
        table.push(vec![
            format!("{numbers:?}"),
            word(splits),
            step.map_or("not decided".into(), word),
        ]);
    }
    table.markdown()
}
