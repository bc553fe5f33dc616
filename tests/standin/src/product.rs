//! Products as cuBLASLt computes them: matrices whose columns follow each other, sums in f64 that
//! are rounded once.

use ptx::Memory;
use std::ops::Range;

/// The type of a matrix's numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Number {
    F32,
    Bf16,
}

impl Number {
    fn bytes(self) -> u64 {
        match self {
            Number::F32 => 4,
            Number::Bf16 => 2,
        }
    }
}

/// A matrix's layout, or that of a batch of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Layout {
    pub(crate) number: Number,
    pub(crate) rows: u64,
    pub(crate) columns: u64,
    /// Numbers from one column to the next.
    pub(crate) pitch: u64,
    pub(crate) batch: u64,
    /// Numbers from one matrix to the next.
    pub(crate) step: u64,
}

impl Layout {
    /// Bytes from the first number to the last.
    fn bytes(&self) -> u64 {
        let numbers = (self.batch - 1) * self.step + (self.columns - 1) * self.pitch + self.rows;
        numbers * self.number.bytes()
    }
    fn sizes(&self, transposed: bool) -> [u64; 2] {
        match transposed {
            true => [self.columns, self.rows],
            false => [self.rows, self.columns],
        }
    }
    fn at(&self, matrix: u64, [row, column]: [u64; 2]) -> u64 {
        matrix * self.step + column * self.pitch + row
    }
}

/// What a product is, without its places.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Problem {
    pub(crate) transposed: [bool; 2],
    /// Factors are rounded to TF32.
    pub(crate) is_tf32: bool,
    pub(crate) has_bias: bool,
    /// Of the factors, the addend and the result.
    pub(crate) layouts: [Layout; 4],
}

impl Problem {
    /// Why these matrices have no product.
    pub(crate) fn misfit(&self) -> Option<String> {
        let [a, b, c, d] = &self.layouts;
        let [left, right] = [a.sizes(self.transposed[0]), b.sizes(self.transposed[1])];
        let pitch = |layout: &&Layout| layout.pitch < layout.rows;
        let all = [a, b, c, d];
        if left[1] != right[0] || [left[0], right[1]] != [d.rows, d.columns] {
            return Some(format!(
                "{left:?} times {right:?} is no {:?}",
                [d.rows, d.columns]
            ));
        }
        if [c.rows, c.columns, c.batch] != [d.rows, d.columns, d.batch] || c.number != d.number {
            return Some("the addend has another shape than the result".into());
        }
        if all.iter().any(pitch) {
            return Some("columns overlap".into());
        }
        if all.iter().any(|layout| layout.batch != d.batch) {
            return Some("the batches differ".into());
        }
        let overlaps = |l: &&Layout| l.batch > 1 && l.step < l.pitch * l.columns;
        if all.iter().any(overlaps) {
            return Some("matrices of a batch overlap".into());
        }
        None
    }
}

/// A product with its places.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) problem: Problem,
    /// Of the factors, the addend and the result.
    pub(crate) at: [u64; 4],
    pub(crate) bias: u64,
    /// The factors of the product and of the addend.
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    /// Its place and bytes.
    pub(crate) workspace: (u64, u64),
}

impl Call {
    /// The bytes that it touches, and whether it writes them. It writes its workspace.
    pub(crate) fn ranges(&self) -> Vec<(Range<u64>, bool)> {
        let Problem {
            layouts, has_bias, ..
        } = &self.problem;
        let range = |i: usize| self.at[i]..self.at[i] + layouts[i].bytes();
        let mut all = vec![(range(0), false), (range(1), false)];
        if self.beta != 0.0 {
            all.push((range(2), false));
        }
        if *has_bias {
            let bytes = layouts[3].rows * layouts[3].number.bytes();
            all.push((self.bias..self.bias + bytes, false));
        }
        all.push((range(3), true));
        let (at, bytes) = self.workspace;
        if bytes > 0 {
            all.push((at..at + bytes, true));
        }
        all
    }

    /// Computes it. All bytes are in bounds.
    pub(crate) fn run(&self, memory: &mut Memory) {
        let Problem {
            layouts: [a, b, c, d],
            transposed,
            is_tf32,
            has_bias,
        } = &self.problem;
        let of = |layout: &Layout, at: u64| -> Vec<f64> {
            let bytes = memory.slice(at, layout.bytes() as usize);
            numbers(layout.number, bytes.expect("it is allocated"))
        };
        let factors = [(a, self.at[0]), (b, self.at[1])].map(|(layout, at)| {
            let mut numbers = of(layout, at);
            if *is_tf32 {
                numbers.iter_mut().for_each(|x| *x = tf32(*x));
            }
            numbers
        });
        let [left, right] = factors;
        let added = (self.beta != 0.0).then(|| of(c, self.at[2]));
        let bias = has_bias.then(|| {
            let bytes = (d.rows * d.number.bytes()) as usize;
            numbers(
                d.number,
                memory.slice(self.bias, bytes).expect("it is allocated"),
            )
        });
        let terms = a.sizes(transposed[0])[1];
        let turned = |[row, column]: [u64; 2], transposed| match transposed {
            true => [column, row],
            false => [row, column],
        };
        let mut results = vec![];
        for matrix in 0..d.batch {
            for column in 0..d.columns {
                for row in 0..d.rows {
                    let mut sum = 0.0;
                    for term in 0..terms {
                        let x = a.at(matrix, turned([row, term], transposed[0]));
                        let y = b.at(matrix, turned([term, column], transposed[1]));
                        sum += left[x as usize] * right[y as usize];
                    }
                    sum *= f64::from(self.alpha);
                    if let Some(added) = &added {
                        let at = c.at(matrix, [row, column]) as usize;
                        sum += f64::from(self.beta) * added[at];
                    }
                    sum += bias.as_ref().map_or(0.0, |bias| bias[row as usize]);
                    results.push((d.at(matrix, [row, column]), sum));
                }
            }
        }
        if self.workspace.1 > 0 {
            let (at, bytes) = self.workspace;
            let room = memory.slice_mut(at, bytes as usize);
            room.expect("it is allocated").fill(0xA5);
        }
        let size = d.number.bytes();
        for (at, result) in results {
            let bytes = memory.slice_mut(self.at[3] + at * size, size as usize);
            let bytes = bytes.expect("it is allocated");
            match d.number {
                Number::F32 => bytes.copy_from_slice(&(result as f32).to_le_bytes()),
                Number::Bf16 => bytes.copy_from_slice(&bf16(result).to_le_bytes()),
            }
        }
    }
}

/// The nearest TF32 of an f32, ties away from zero.
fn tf32(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    let bits = (x as f32).to_bits().wrapping_add(0x1000) & !0x1fff;
    f64::from(f32::from_bits(bits))
}

fn numbers(number: Number, bytes: &[u8]) -> Vec<f64> {
    match number {
        Number::F32 => {
            let (all, _) = bytes.as_chunks::<4>();
            all.iter()
                .map(|&b| f64::from(f32::from_le_bytes(b)))
                .collect()
        }
        Number::Bf16 => {
            let (all, _) = bytes.as_chunks::<2>();
            let wide = |&b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16);
            all.iter().map(|b| f64::from(wide(b))).collect()
        }
    }
}

/// The nearest bf16, ties to even, rounded once. Numbers below its normal ones are rounded twice.
fn bf16(x: f64) -> u16 {
    /// Bits of f64 that bf16 lacks.
    const LACKS: u32 = 52 - 7;
    let bits = x.to_bits();
    let rounded = match x.is_finite() {
        true => bits + (1 << (LACKS - 1)) - 1 + (bits >> LACKS & 1),
        false => bits,
    };
    let cut = f64::from_bits(rounded >> LACKS << LACKS) as f32;
    let quiet = if x.is_nan() { 0x40 } else { 0 };
    (cut.to_bits() >> 16) as u16 | quiet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_the_nearest() {
        for (x, bits) in [
            (1.0, 0x3F80),
            (-2.5, 0xC020),
            // Halfway between two: the even one. A little more: the upper one.
            (1.0 + 1.0 / 256.0, 0x3F80),
            (1.0 + 3.0 / 256.0, 0x3F82),
            (1.0 + 1.0 / 256.0 + 1e-12, 0x3F81),
            (f64::INFINITY, 0x7F80),
            (1e39, 0x7F80),
            (0.0, 0),
        ] {
            assert_eq!(bf16(x), bits, "{x}");
        }
        assert!(f32::from_bits(u32::from(bf16(f64::NAN)) << 16).is_nan());
    }

    /// A product by hand: two matrices of a batch, the left one transposed, an addend.
    #[test]
    fn a_product_by_hand() {
        let layout = |rows, columns| Layout {
            number: Number::F32,
            rows,
            columns,
            pitch: rows,
            batch: 2,
            step: rows * columns,
        };
        let problem = Problem {
            transposed: [true, false],
            is_tf32: false,
            has_bias: false,
            layouts: [layout(2, 1), layout(2, 2), layout(1, 2), layout(1, 2)],
        };
        assert_eq!(problem.misfit(), None);
        let mut memory = Memory::new();
        let a = memory.add_f32(&[1.0, 2.0, 3.0, 4.0]);
        let b = memory.add_f32(&[1.0, 0.0, 0.0, 1.0, 5.0, 6.0, 7.0, 8.0]);
        let c = memory.add_f32(&[10.0, 20.0, 30.0, 40.0]);
        let d = memory.room(16);
        let call = Call {
            problem,
            at: [a, b, c, d],
            bias: 0,
            alpha: 1.0,
            beta: 1.0,
            workspace: (0, 0),
        };
        call.run(&mut memory);
        assert_eq!(memory.f32(d), [11.0, 22.0, 69.0, 93.0]);
        let wrong = Problem {
            transposed: [false, false],
            ..problem
        };
        assert!(wrong.misfit().is_some());
    }
}
