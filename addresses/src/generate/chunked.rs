//! Requests of a rank in Colossal-AI's Gemini with ZeRO-3: parameters lie in chunks of one size,
//! divided over the ranks, and on the host. A chunk is gathered before an operation that reads it,
//! and released when another one is needed. In the backward, gradients take the place of the
//! parameters in their chunk, which is then summed over the ranks and goes to the host.
//!
//! The model is GPT-2 with attention that keeps its scores, as in Hugging Face's code. Source:
//! `colossalai/zero/gemini/chunk/chunk.py`, `gemini_ddp.py`.

use super::writer::{Live, Writer};
use super::{HALF, Shape};
use placement::trace::Trace;

/// Steps of a rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chunked {
    /// The model; its attention must have as many heads of keys as of queries.
    pub shape: Shape,
    /// Sequences of a batch.
    pub batch: u64,
    /// Ranks over which parameters, gradients and states are divided.
    pub ranks: u64,
    /// Elements of a chunk: Gemini's default is at least 32 Mi.
    pub chunk: u64,
    /// Steps.
    pub steps: usize,
}

/// The operations of a layer that have weights, with elements of the weight in squares of the
/// width.
const WEIGHTS: [u64; 4] = [3, 1, 4, 4];

impl Chunked {
    /// The trace of the steps.
    pub fn trace(&self) -> Trace {
        let mut run = Run {
            setup: self,
            writer: Writer::new(false),
            gathered: None,
        };
        for step in 0..self.steps {
            run.step(step);
        }
        run.writer.finish()
    }

    /// The chunk of an operation's weight. The embedding comes first, as in the model.
    fn chunk_of(&self, layer: usize, operation: usize) -> u64 {
        let square = self.shape.width * self.shape.width;
        let of_layer: u64 = WEIGHTS.iter().sum();
        let before = of_layer * layer as u64 + WEIGHTS[..operation].iter().sum::<u64>();
        (self.shape.vocabulary * self.shape.width + before * square) / self.chunk
    }
}

struct Run<'a> {
    setup: &'a Chunked,
    writer: Writer,
    /// The chunk on the device.
    gathered: Option<(u64, Live)>,
}

/// What a layer keeps, in the order of its requests.
struct Layer {
    attention: Vec<Live>,
    feed_forward: Vec<Live>,
}

impl Run<'_> {
    /// Bytes of the residual stream.
    fn stream(&self) -> u64 {
        self.setup.shape.sequence * self.setup.batch * self.setup.shape.width * HALF
    }

    /// Bytes of the scores of all heads.
    fn scores(&self) -> u64 {
        let shape = &self.setup.shape;
        self.setup.batch * shape.heads * shape.sequence * shape.sequence * HALF
    }

    /// Makes a chunk complete on the device, in the place of the one before.
    fn gather(&mut self, chunk: u64) {
        if self.gathered.is_some_and(|(there, _)| there == chunk) {
            return;
        }
        self.release();
        // The rank's part comes from the host; then all parts are gathered.
        let part = self.writer.get(self.setup.chunk / self.setup.ranks * HALF);
        let whole = self.writer.get(self.setup.chunk * HALF);
        self.writer.free(part);
        self.gathered = Some((chunk, whole));
    }

    /// Divides the chunk over the ranks again; the rank's part goes to the host.
    fn release(&mut self) {
        if let Some((_, whole)) = self.gathered.take() {
            let part = self.writer.get(self.setup.chunk / self.setup.ranks * HALF);
            self.writer.free(whole);
            self.writer.free(part);
        }
    }

    fn step(&mut self, step: usize) {
        self.writer.begin_phase(format!("fwd.{step}"));
        let layers = self.setup.shape.layers;
        self.gather(0);
        let mut inputs = vec![self.writer.get(self.stream())];
        let mut kept = vec![];
        for layer in 0..layers {
            let (blocks, result) = self.layer(layer);
            kept.push(blocks);
            inputs.push(result);
        }
        self.gather(0);
        let logits =
            self.setup.shape.sequence * self.setup.batch * self.setup.shape.vocabulary * HALF;
        // The logits, those that have a next token, and their logarithms.
        let head = [logits; 3].map(|bytes| self.writer.get(bytes));
        self.writer.end_phase();
        self.writer.begin_phase(format!("bwd.{step}"));
        let of_shifted = self.writer.get(logits);
        self.writer.free(head[2]);
        let of_logits = self.writer.get(logits);
        for block in [of_shifted, head[1]] {
            self.writer.free(block);
        }
        let mut gradient = self.writer.get(self.stream());
        for block in [of_logits, head[0]] {
            self.writer.free(block);
        }
        self.writer
            .free(inputs.pop().expect("the last layer should have a result"));
        for layer in (0..layers).rev() {
            let blocks = kept.pop().expect("each layer should have kept blocks");
            gradient = self.layer_backward(layer, blocks, gradient);
            self.writer
                .free(inputs.pop().expect("each layer should have an input"));
        }
        self.gather(0);
        self.writer
            .touch(self.setup.shape.vocabulary * self.setup.shape.width * HALF);
        self.writer.free(gradient);
        self.release();
        self.writer.end_phase();
    }

    fn layer(&mut self, layer: usize) -> (Layer, Live) {
        let (stream, scores) = (self.stream(), self.scores());
        let mut attention = vec![self.writer.get(stream)];
        self.gather(self.setup.chunk_of(layer, 0));
        attention.push(self.writer.get(3 * stream));
        // Scores, scaled and masked; probabilities; a dropout's mask and result.
        let product = self.writer.get(scores);
        let scaled = self.writer.get(scores);
        self.writer.free(product);
        let masked = self.writer.get(scores);
        self.writer.free(scaled);
        attention.push(self.writer.get(scores));
        self.writer.free(masked);
        attention.extend([scores / HALF, scores].map(|bytes| self.writer.get(bytes)));
        let attended = self.writer.get(stream);
        attention.push(self.writer.get(stream));
        self.writer.free(attended);
        self.gather(self.setup.chunk_of(layer, 1));
        let projected = self.writer.get(stream);
        attention.push(self.writer.get(stream / HALF));
        let dropped = self.writer.get(stream);
        self.writer.free(projected);
        attention.push(self.writer.get(stream));
        self.writer.free(dropped);
        let mut feed_forward = vec![self.writer.get(stream)];
        self.gather(self.setup.chunk_of(layer, 2));
        feed_forward.push(self.writer.get(4 * stream));
        // GELU by its formula: half of x, the cube, its argument, tanh, one more, the product.
        feed_forward.push(self.writer.get(4 * stream));
        let cube = self.writer.get(4 * stream);
        let argument = self.writer.get(4 * stream);
        self.writer.free(cube);
        feed_forward.push(self.writer.get(4 * stream));
        self.writer.free(argument);
        feed_forward.extend([4 * stream; 2].map(|bytes| self.writer.get(bytes)));
        self.gather(self.setup.chunk_of(layer, 3));
        let out = self.writer.get(stream);
        feed_forward.push(self.writer.get(stream / HALF));
        let dropped = self.writer.get(stream);
        self.writer.free(out);
        let result = self.writer.get(stream);
        self.writer.free(dropped);
        let kept = Layer {
            attention,
            feed_forward,
        };
        (kept, result)
    }

    /// The gradient of a layer's input.
    fn layer_backward(&mut self, layer: usize, kept: Layer, gradient: Live) -> Live {
        let stream = self.stream();
        let of_out = self.writer.get(stream);
        self.weight_backward(layer, 3);
        let of_hidden = self.parts_backward(of_out, &kept.feed_forward[1..]);
        self.weight_backward(layer, 2);
        self.writer.free(kept.feed_forward[0]);
        let gradient = self.joined(of_hidden, gradient);
        let of_projected = self.writer.get(stream);
        self.weight_backward(layer, 1);
        let of_heads = self.parts_backward(of_projected, &kept.attention[1..]);
        self.weight_backward(layer, 0);
        self.writer.free(kept.attention[0]);
        self.joined(of_heads, gradient)
    }

    /// The gradient through operations, each of which kept a block: each gradient has its size.
    fn parts_backward(&mut self, mut gradient: Live, kept: &[Live]) -> Live {
        for &block in kept.iter().rev() {
            let next = self.writer.get(self.writer.block(block).bytes);
            self.writer.free(gradient);
            self.writer.free(block);
            gradient = next;
        }
        gradient
    }

    /// The gradient through a product and a norm, added to that of the path beside them.
    fn joined(&mut self, of_inner: Live, beside: Live) -> Live {
        let of_normed = self.writer.get(self.stream());
        self.writer.free(of_inner);
        let of_input = self.writer.get(self.stream());
        self.writer.free(of_normed);
        let sum = self.writer.get(self.stream());
        self.writer.free(of_input);
        self.writer.free(beside);
        sum
    }

    /// A weight's gradient, which is copied into its chunk.
    fn weight_backward(&mut self, layer: usize, operation: usize) {
        self.gather(self.setup.chunk_of(layer, operation));
        let width = self.setup.shape.width;
        self.writer.touch(WEIGHTS[operation] * width * width * HALF);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Model;
    use super::*;
    use crate::stats::stats;

    #[test]
    fn nothing_stays_on_the_device_between_steps() {
        let setup = Chunked {
            shape: Model::Gpt2.shape(),
            batch: 1,
            ranks: 8,
            chunk: 32 << 20,
            steps: 2,
        };
        let trace = setup.trace();
        assert!(trace.blocks.iter().all(|block| block.start < block.end));
        let boundary = trace.phases[3].start;
        let lives =
            |block: &&placement::trace::Block| block.start < boundary && boundary < block.end;
        assert_eq!(trace.blocks.iter().find(lives), None);
        // A chunk of 64 MiB, and the rank's part of it.
        let sizes = stats(&trace).frequent;
        assert!(
            sizes.iter().any(|&(bytes, _)| bytes == 64 << 20),
            "{sizes:?}"
        );
    }
}
