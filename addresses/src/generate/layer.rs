//! The requests of a transformer's layer on a rank, forward and backward, in the order of
//! Megatron-LM with its fused kernels: norms, rotations, gates, flash attention. Products add the
//! weights' gradients to the gradients' buffer, and request a dummy of the weight's size, as
//! Megatron does for autograd.

use super::setup::Setup;
use super::writer::{Live, Writer};
use super::{FULL, HALF};

/// Rows of partial sums of a norm's weight gradient: one for each multiprocessor of an A800.
const PARTIALS: u64 = 108;
/// Bytes of the random state of an attention kernel.
const RANDOM_STATE: u64 = 16;

/// What a tensor is that a forward keeps for its backward.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Part {
    Normed(usize),
    Statistics(usize),
    Heads,
    Attended,
    Context,
    Mask(usize),
    Residual,
    Inner,
    Product,
    Scores,
    Received,
    Combined,
    OfExpert(usize),
}

/// The tensors that a layer keeps.
pub(super) struct Kept {
    /// False in a forward whose backward runs the layer again, or that has none.
    pub(super) keep: bool,
    pub(super) blocks: Vec<(Part, Live)>,
}

/// A rank while it runs.
pub(super) struct Rank<'a> {
    pub(super) setup: &'a Setup,
    pub(super) writer: Writer,
    /// Tokens of a sequence of the micro-batch that runs.
    pub(super) sequence: u64,
    /// Number of that micro-batch in the run.
    pub(super) number: u64,
}

impl Rank<'_> {
    pub(super) fn tokens(&self) -> u64 {
        self.sequence * self.setup.batch
    }

    /// Tokens of the tensors between the products.
    pub(super) fn own_tokens(&self) -> u64 {
        match self.setup.sequence_parallel {
            true => self.tokens() / self.setup.tensor,
            false => self.tokens(),
        }
    }

    /// Bytes of the residual stream.
    pub(super) fn stream(&self) -> u64 {
        self.own_tokens() * self.setup.shape.width * HALF
    }

    /// Bytes of the residual stream of all ranks of a product.
    pub(super) fn whole_stream(&self) -> u64 {
        self.tokens() * self.setup.shape.width * HALF
    }

    /// Elements of this rank's queries, and of its keys, for a token. A rank has at least one head.
    pub(super) fn heads(&self) -> (u64, u64) {
        let shape = &self.setup.shape;
        let keys = (shape.key_heads / self.setup.tensor).max(1);
        (
            shape.heads / self.setup.tensor * shape.head,
            keys * shape.head,
        )
    }

    /// Elements of this rank's two weights of a feed-forward part.
    pub(super) fn feed_forward_weights(&self, hidden: u64) -> [u64; 2] {
        let widths = 1 + u64::from(self.setup.shape.gated);
        let one = hidden * self.setup.shape.width / self.setup.tensor;
        [widths * one, one]
    }

    /// A block that nothing reads in the rest of the forward.
    pub(super) fn done(&mut self, kept: &mut Kept, part: Part, block: Live) {
        match kept.keep {
            true => kept.blocks.push((part, block)),
            false => self.writer.free(block),
        }
    }

    /// Frees what was kept as `part`.
    pub(super) fn drop(&mut self, kept: &mut Vec<(Part, Live)>, part: Part) {
        let writer = &mut self.writer;
        kept.retain(|&(kind, block)| {
            if kind == part {
                writer.free(block);
            }
            kind != part
        });
    }

    /// A layer's forward: what it keeps, and its result.
    pub(super) fn layer(&mut self, layer: usize, keep: bool) -> (Vec<(Part, Live)>, Live) {
        self.writer.begin_module(format!("layers.{layer}"));
        let mut kept = Kept {
            keep,
            blocks: vec![],
        };
        let residual = self.attention(&mut kept);
        let normed = self.norm(&mut kept, 1);
        self.gathers(normed);
        let out = if self.setup.shape.experts == 0 {
            self.feed_forward(self.setup.shape.hidden, &mut kept)
        } else {
            self.mixture(layer, &mut kept)
        };
        self.done(&mut kept, Part::Normed(1), normed);
        self.mask(&mut kept, 1);
        let result = self.writer.get(self.stream());
        self.writer.free(out);
        self.done(&mut kept, Part::Residual, residual);
        self.writer.end_module();
        (kept.blocks, result)
    }

    /// A norm's result. Its statistics are kept.
    pub(super) fn norm(&mut self, kept: &mut Kept, number: usize) -> Live {
        let rows = self.own_tokens() * FULL;
        let normed = self.writer.get(self.stream());
        for _ in 0..2 - u64::from(self.setup.shape.gated) {
            let statistics = self.writer.get(rows);
            self.done(kept, Part::Statistics(number), statistics);
        }
        normed
    }

    /// The mask of a dropout: a byte for each element.
    fn mask(&mut self, kept: &mut Kept, number: usize) {
        if !self.setup.shape.gated {
            let mask = self.writer.get(self.stream() / HALF);
            self.done(kept, Part::Mask(number), mask);
        }
    }

    /// Ranks of a product exchange a tensor, if there are several.
    pub(super) fn crosses_ranks(&mut self, block: Live) {
        if self.setup.tensor > 1 {
            self.writer.collective(block);
        }
    }

    /// The ranks of a product gather a tensor that is divided by tokens.
    pub(super) fn gathers(&mut self, block: Live) {
        if self.setup.sequence_parallel {
            self.crosses_ranks(block);
        }
    }

    /// The result of a product whose summands are on several ranks.
    pub(super) fn summed(&mut self) -> Live {
        let whole = self.writer.get(self.whole_stream());
        self.reduced(whole)
    }

    /// The sum of a tensor over the ranks, or this rank's part of it.
    fn reduced(&mut self, whole: Live) -> Live {
        self.crosses_ranks(whole);
        if !self.setup.sequence_parallel {
            // All ranks sum in place.
            return whole;
        }
        let own = self.writer.get(self.stream());
        self.writer.free(whole);
        own
    }

    /// The first half of a layer; the result is the input of its second norm.
    fn attention(&mut self, kept: &mut Kept) -> Live {
        let (queries, keys) = self.heads();
        let tokens = self.tokens();
        let [queries, keys] = [queries, keys].map(|width| tokens * width * HALF);
        let rows = tokens * self.setup.shape.heads / self.setup.tensor * FULL;
        let normed = self.norm(kept, 0);
        self.gathers(normed);
        let joined = self.writer.get(queries + 2 * keys);
        self.done(kept, Part::Normed(0), normed);
        let rotated = match self.setup.shape.gated {
            true => vec![queries, keys],
            false => vec![],
        };
        let rotated = rotated.into_iter().map(|bytes| self.writer.get(bytes));
        let rotated: Vec<Live> = rotated.collect();
        // The kernel needs them contiguous, sequence by sequence.
        let parts = [queries, keys, keys].map(|bytes| self.writer.get(bytes));
        for block in rotated.into_iter().chain([joined]) {
            self.writer.free(block);
        }
        let attended = [queries, rows, RANDOM_STATE].map(|bytes| self.writer.get(bytes));
        // Back to the order of the other tensors: token by token.
        let context = self.writer.get(queries);
        for block in parts {
            self.done(kept, Part::Heads, block);
        }
        for block in attended {
            self.done(kept, Part::Attended, block);
        }
        let projected = self.summed();
        self.done(kept, Part::Context, context);
        self.mask(kept, 0);
        let residual = self.writer.get(self.stream());
        self.writer.free(projected);
        residual
    }

    /// Two products with a function in between.
    pub(super) fn feed_forward(&mut self, hidden: u64, kept: &mut Kept) -> Live {
        let bytes = self.tokens() * hidden / self.setup.tensor * HALF;
        let inner = self
            .writer
            .get(bytes * (1 + u64::from(self.setup.shape.gated)));
        let product = self.writer.get(bytes);
        self.done(kept, Part::Inner, inner);
        let out = self.summed();
        self.done(kept, Part::Product, product);
        out
    }

    /// A layer's backward; the result is the gradient of its input, which it frees with the
    /// gradient of its result.
    pub(super) fn layer_backward(
        &mut self,
        layer: usize,
        input: Live,
        mut kept: Vec<(Part, Live)>,
        gradient: Live,
    ) -> Live {
        self.writer.begin_module(format!("layers.{layer}.backward"));
        let masked = self.unmasked(&mut kept, 1);
        self.gathers(masked.unwrap_or(gradient));
        let of_normed = if self.setup.shape.experts == 0 {
            self.feed_forward_backward(self.setup.shape.hidden, masked, &mut kept)
        } else {
            self.mixture_backward(layer, masked, &mut kept)
        };
        self.drop(&mut kept, Part::Normed(1));
        let gradient = self.norm_backward(of_normed, gradient, &mut kept, 1);
        self.drop(&mut kept, Part::Residual);
        let masked = self.unmasked(&mut kept, 0);
        self.gathers(masked.unwrap_or(gradient));
        let of_normed = self.attention_backward(masked, &mut kept);
        let gradient = self.norm_backward(of_normed, gradient, &mut kept, 0);
        self.writer.free(input);
        // A kept tensor that no function frees would stay forever.
        assert!(kept.is_empty(), "a backward should free what is kept");
        self.writer.end_module();
        gradient
    }

    /// The gradient behind a dropout. None without dropout: it is the gradient itself.
    fn unmasked(&mut self, kept: &mut Vec<(Part, Live)>, number: usize) -> Option<Live> {
        if self.setup.shape.gated {
            return None;
        }
        let masked = self.writer.get(self.stream());
        self.drop(kept, Part::Mask(number));
        Some(masked)
    }

    /// The gradient of a norm's input, added to that of the path beside it.
    fn norm_backward(
        &mut self,
        of_normed: Live,
        beside: Live,
        kept: &mut Vec<(Part, Live)>,
        number: usize,
    ) -> Live {
        let width = self.setup.shape.width;
        let of_input = self.writer.get(self.stream());
        let partial = self.writer.get(width * FULL * PARTIALS);
        let of_weight = self.writer.get(width * HALF);
        self.writer.free(partial);
        self.drop(kept, Part::Statistics(number));
        self.writer.free(of_normed);
        self.writer.free(of_weight);
        let sum = self.writer.get(self.stream());
        self.writer.free(of_input);
        self.writer.free(beside);
        sum
    }

    /// The gradient of a product's input of `bytes`, with the dummy of the weight's gradient. Frees
    /// the input if it was kept as `part`.
    pub(super) fn product_backward(
        &mut self,
        bytes: u64,
        weights: u64,
        kept: &mut Vec<(Part, Live)>,
        part: Option<Part>,
    ) -> Live {
        let of_input = self.writer.get(bytes);
        let of_weight = self.writer.get(weights * HALF);
        if let Some(part) = part {
            self.drop(kept, part);
        }
        self.writer.free(of_weight);
        of_input
    }

    /// The gradient of the input of a product that all ranks read, summed over the ranks.
    fn summed_backward(&mut self, weights: u64, kept: &mut Vec<(Part, Live)>) -> Live {
        let whole = self.product_backward(self.whole_stream(), weights, kept, None);
        self.reduced(whole)
    }

    pub(super) fn feed_forward_backward(
        &mut self,
        hidden: u64,
        masked: Option<Live>,
        kept: &mut Vec<(Part, Live)>,
    ) -> Live {
        let [first, second] = self.feed_forward_weights(hidden);
        let bytes = self.tokens() * hidden / self.setup.tensor * HALF;
        let of_product = self.product_backward(bytes, second, kept, Some(Part::Product));
        masked.into_iter().for_each(|block| self.writer.free(block));
        let inner = bytes * (1 + u64::from(self.setup.shape.gated));
        let of_inner = self.writer.get(inner);
        self.drop(kept, Part::Inner);
        self.writer.free(of_product);
        let of_normed = self.summed_backward(first, kept);
        self.writer.free(of_inner);
        of_normed
    }

    fn attention_backward(&mut self, masked: Option<Live>, kept: &mut Vec<(Part, Live)>) -> Live {
        let (of_queries, of_keys) = self.heads();
        let (tokens, width) = (self.tokens(), self.setup.shape.width);
        let [queries, keys] = [of_queries, of_keys].map(|width| tokens * width * HALF);
        let rows = tokens * self.setup.shape.heads / self.setup.tensor * FULL;
        let of_context =
            self.product_backward(queries, of_queries * width, kept, Some(Part::Context));
        masked.into_iter().for_each(|block| self.writer.free(block));
        let of_attended = self.writer.get(queries);
        self.writer.free(of_context);
        let parts = [queries, keys, keys].map(|bytes| self.writer.get(bytes));
        // The kernel sums the gradient of the queries in f32.
        let scratch = [rows, 2 * queries].map(|bytes| self.writer.get(bytes));
        scratch
            .into_iter()
            .for_each(|block| self.writer.free(block));
        self.drop(kept, Part::Heads);
        self.drop(kept, Part::Attended);
        self.writer.free(of_attended);
        let turned = [queries, keys, keys].map(|bytes| self.writer.get(bytes));
        parts.into_iter().for_each(|block| self.writer.free(block));
        let of_joined = self.writer.get(queries + 2 * keys);
        turned.into_iter().for_each(|block| self.writer.free(block));
        let of_normed = self.summed_backward((of_queries + 2 * of_keys) * width, kept);
        self.drop(kept, Part::Normed(0));
        self.writer.free(of_joined);
        of_normed
    }
}
