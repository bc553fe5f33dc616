//! The requests of a mixture of experts: a router, tokens that go to other ranks, one expert after
//! the other, and an expert that all tokens go to (Megatron-LM's `SequentialMLP` with an
//! all-to-all). Sizes of the experts' requests are known only at run time.

use super::layer::{Kept, Part, Rank};
use super::writer::{Live, draw};
use super::{FULL, HALF};

impl Rank<'_> {
    /// The tokens that each expert of this rank gets from all ranks: between half and one and a
    /// half times the mean. A layer that runs again gets the same ones.
    fn routed(&self, layer: usize) -> Vec<u64> {
        let shape = &self.setup.shape;
        // Every rank sends; this one has its share of the experts.
        let sent = self.own_tokens() * shape.top * self.setup.expert as u64;
        let mean = sent / shape.experts.max(1) as u64;
        let of = |expert: usize| {
            let random = draw(&[self.setup.seed, self.number, layer as u64, expert as u64]);
            (mean / 2 + random % (mean + 1)).max(1)
        };
        (0..self.setup.own_experts()).map(of).collect()
    }

    /// Ranks of the experts send tokens to each other, if there are several.
    fn exchanges(&mut self, from: Live, to: Live) {
        if self.setup.expert > 1 {
            self.writer.collective(from);
            self.writer.collective(to);
        }
    }

    pub(super) fn mixture(&mut self, layer: usize, kept: &mut Kept) -> Live {
        let shape = self.setup.shape;
        let [scores, probabilities] = [self.own_tokens() * shape.experts as u64 * FULL; 2]
            .map(|bytes| self.writer.get(bytes));
        self.writer.free(scores);
        let permuted = self.writer.get(self.stream() * shape.top);
        self.done(kept, Part::Scores, probabilities);
        self.writer.end_module();
        self.writer.begin_module(format!("layers.{layer}.experts"));
        let counts = self.routed(layer);
        let all = counts.iter().sum::<u64>() * shape.width * HALF;
        let received = match self.setup.expert {
            1 => permuted,
            _ => {
                let received = self.writer.get_dynamic(all);
                self.exchanges(permuted, received);
                self.writer.free(permuted);
                received
            }
        };
        let mut results = vec![];
        for (expert, n) in counts.into_iter().enumerate() {
            let bytes = n * shape.hidden * HALF;
            let [inner, product] = [2 * bytes, bytes].map(|bytes| self.writer.get_dynamic(bytes));
            self.done(kept, Part::OfExpert(expert), inner);
            results.push(self.writer.get_dynamic(n * shape.width * HALF));
            self.done(kept, Part::OfExpert(expert), product);
        }
        let joined = self.writer.get_dynamic(all);
        results
            .into_iter()
            .for_each(|block| self.writer.free(block));
        self.done(kept, Part::Received, received);
        self.writer.end_module();
        self.writer.begin_module(format!("layers.{layer}.combine"));
        let combined = self.writer.get(self.stream() * shape.top);
        self.exchanges(joined, combined);
        self.writer.free(joined);
        let mut out = self.writer.get(self.stream());
        self.done(kept, Part::Combined, combined);
        if shape.shared > 0 {
            let shared = self.feed_forward(shape.shared, kept);
            let sum = self.writer.get(self.stream());
            self.writer.free(shared);
            self.writer.free(out);
            out = sum;
        }
        out
    }

    pub(super) fn mixture_backward(
        &mut self,
        layer: usize,
        masked: Option<Live>,
        kept: &mut Vec<(Part, Live)>,
    ) -> Live {
        let shape = self.setup.shape;
        let of_shared =
            (shape.shared > 0).then(|| self.feed_forward_backward(shape.shared, None, kept));
        let of_combined = self.writer.get(self.stream() * shape.top);
        masked.into_iter().for_each(|block| self.writer.free(block));
        self.drop(kept, Part::Combined);
        self.writer.end_module();
        self.writer
            .begin_module(format!("layers.{layer}.experts.backward"));
        let counts = self.routed(layer);
        let all = counts.iter().sum::<u64>() * shape.width * HALF;
        let of_joined = self.writer.get_dynamic(all);
        self.exchanges(of_combined, of_joined);
        self.writer.free(of_combined);
        let one = shape.hidden * shape.width;
        let mut results = vec![];
        for (expert, n) in counts.into_iter().enumerate().rev() {
            let bytes = n * shape.hidden * HALF;
            let of_product = self.writer.get_dynamic(bytes);
            self.writer.touch(one * HALF);
            let of_inner = self.writer.get_dynamic(2 * bytes);
            self.writer.free(of_product);
            self.drop(kept, Part::OfExpert(expert));
            results.push(self.writer.get_dynamic(n * shape.width * HALF));
            self.writer.touch(2 * one * HALF);
            self.writer.free(of_inner);
        }
        let of_received = self.writer.get_dynamic(all);
        results
            .into_iter()
            .for_each(|block| self.writer.free(block));
        self.writer.free(of_joined);
        self.drop(kept, Part::Received);
        let of_permuted = self.writer.get(self.stream() * shape.top);
        self.exchanges(of_received, of_permuted);
        self.writer.free(of_received);
        self.writer.end_module();
        self.writer.begin_module(format!("layers.{layer}.backward"));
        let of_normed = self.writer.get(self.stream());
        self.writer.free(of_permuted);
        self.writer
            .touch(self.own_tokens() * shape.experts as u64 * FULL);
        self.drop(kept, Part::Scores);
        let Some(of_shared) = of_shared else {
            return of_normed;
        };
        let sum = self.writer.get(self.stream());
        self.writer.free(of_normed);
        self.writer.free(of_shared);
        sum
    }
}
