//! Products of factors and results of one type. Half-precision results are rounded from blocks of
//! f32.

use super::Ran;
use super::math::Float;
use super::product::{Numbers, Start, Tile, Tiled, product_part};
use super::wide::Wide;
use crate::kernel::{Call, Window};
use artifact::DType;
use half::{bf16, f16};
use std::ops::Range;

/// A type of factors.
pub(super) trait Factor: Float<Wide: Tiled> {
    /// [`product_part`] with a result of the factors' type.
    fn product_part(
        tile: &Tile<Self::Wide>,
        sizes: (usize, usize, usize),
        part: (Range<usize>, Range<usize>),
        flags: (bool, bool),
        factors: (&[Self], &[Self]),
        y: Window<'_, Self>,
        start: Start<'_, Self::Wide>,
    );
    /// Makes this thread's workspaces.
    fn prepare() {
        Self::Wide::with_room(|_| {});
        Self::Wide::with_space(Self::room(BLOCK.0 * BLOCK.1), |_| {});
    }
}

/// Makes the workspaces of a thread that computes a product.
pub(super) fn prepare(call: &Call<'_>) -> Ran {
    match call.out_dtype(0) {
        DType::F32 => f32::prepare(),
        DType::F64 => f64::prepare(),
        DType::BF16 => bf16::prepare(),
        DType::F16 => f16::prepare(),
        // Integers need none.
        _ => {}
    }
    Ok(())
}

macro_rules! factor {
    ($ty:ident, $numbers:ident, $product:path) => {
        impl Factor for $ty {
            fn product_part(
                tile: &Tile<Self::Wide>,
                sizes: (usize, usize, usize),
                part: (Range<usize>, Range<usize>),
                flags: (bool, bool),
                (x, w): (&[$ty], &[$ty]),
                y: Window<'_, $ty>,
                start: Start<'_, Self::Wide>,
            ) {
                let factors = (Numbers::$numbers(x), Numbers::$numbers(w));
                $product(tile, sizes, part, flags, factors, y, start);
            }
        }
    };
}
factor!(f32, Wide, product_part);
factor!(f64, Wide, product_part);
factor!(bf16, Bf16, rounded_part);
factor!(f16, F16, rounded_part);

/// Rows and columns of a block that is rounded. The right factor is packed for each block.
const BLOCK: (usize, usize) = (1024, 256);

fn rounded_part<T: Float<Wide: Tiled>>(
    tile: &Tile<T::Wide>,
    sizes: (usize, usize, usize),
    (rows, columns): (Range<usize>, Range<usize>),
    flags: (bool, bool),
    factors: (Numbers<'_, T::Wide>, Numbers<'_, T::Wide>),
    mut y: Window<'_, T>,
    start: Start<'_, T::Wide>,
) {
    T::Wide::with_space(T::room(BLOCK.0 * BLOCK.1), |room| {
        for top in rows.clone().step_by(BLOCK.0) {
            let height = BLOCK.0.min(rows.end - top);
            for left in columns.clone().step_by(BLOCK.1) {
                let width = BLOCK.1.min(columns.end - left);
                let (i, j) = (top - rows.start, left - columns.start);
                let mut y = y.part(i..i + height, j..j + width);
                let room = &mut room[..height * width];
                if let Start::Result = start {
                    for (i, room) in room.chunks_exact_mut(width).enumerate() {
                        T::Wide::load(y.row(i), room);
                    }
                }
                let part = (top..top + height, left..left + width);
                let window = Window::new(&mut *room, height, width);
                product_part(tile, sizes, part, flags, factors, window, start);
                for (i, room) in room.chunks_exact(width).enumerate() {
                    T::Wide::store(room, y.row(i));
                }
            }
        }
    });
}
