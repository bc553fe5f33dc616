//! An f32 as two halves: a bf16, and 16 more bits. See the op `adamw_split`.

/// The two halves of an f32: the nearest bf16 and the distance between the bit patterns. If two are
/// equally near, the bf16 with the larger magnitude. Every pair belongs to exactly one f32, except
/// the pairs of a NaN. (With ties to even this is impossible: an even bf16 would be the nearest of
/// 65537 numbers, and 16 bits distinguish only 65536.) A NaN stays a NaN and loses its lower half.
#[inline(always)]
pub fn split(master: f32) -> (u16, u16) {
    let bits = master.to_bits();
    let nan = 0x7F80_0000 < bits & 0x7FFF_FFFF;
    let bits = if nan {
        bits & 0xFFFF_0000 | 0x0040_0000
    } else {
        bits
    };
    ((bits.wrapping_add(0x8000) >> 16) as u16, bits as u16)
}
/// The f32 of two halves.
#[inline(always)]
pub fn join(high: u16, low: u16) -> f32 {
    let below = u32::from(low >> 15);
    f32::from_bits((u32::from(high).wrapping_sub(below) << 16) | u32::from(low))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    /// Every upper half, with lower halves around the points where rounding changes.
    fn each(mut f: impl FnMut(u32)) {
        let lows = [
            0, 1, 2, 0x3FFF, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFE, 0xFFFF,
        ];
        for high in 0..=0xFFFFu32 {
            lows.iter().for_each(|low| f(high << 16 | low));
        }
        // All lower halves of a normal, a subnormal, zero, the largest, and a negative number.
        for high in [0x3F80, 0x3F81, 0x0001, 0x0000, 0x7F7F, 0xBFFF, 0xFF7F] {
            (0..=0xFFFF).for_each(|low| f(high << 16 | low));
        }
    }

    #[test]
    fn halves_are_the_whole() {
        each(|bits| {
            let master = f32::from_bits(bits);
            let (high, low) = split(master);
            let back = join(high, low);
            if master.is_nan() {
                assert!(back.is_nan() && bf16::from_bits(high).is_nan(), "{bits:#x}");
                assert!(
                    back.is_sign_negative() == master.is_sign_negative(),
                    "{bits:#x}"
                );
            } else {
                assert_eq!(back.to_bits(), bits);
            }
        });
    }

    #[test]
    fn pairs_are_numbers() {
        each(|bits| {
            let (high, low) = ((bits >> 16) as u16, bits as u16);
            let master = join(high, low);
            if !master.is_nan() {
                assert_eq!(split(master), (high, low), "{bits:#x}");
            }
        });
    }

    #[test]
    fn the_upper_half_is_the_nearest() {
        each(|bits| {
            let master = f32::from_bits(bits);
            let high = bf16::from_bits(split(master).0);
            let even = bf16::from_f32(master);
            let tie = bits & 0xFFFF == 0x8000;
            if master.is_nan() {
                assert!(high.is_nan());
            } else if tie {
                let down = bf16::from_bits((bits >> 16) as u16);
                assert!(
                    high.to_bits() == down.to_bits() + 1,
                    "{bits:#x} away from zero"
                );
            } else {
                assert_eq!(high.to_bits(), even.to_bits(), "{bits:#x}");
            }
        });
    }

    #[test]
    fn a_bf16_is_its_own_master() {
        for high in 0..=0xFFFF {
            assert_eq!(join(high, 0).to_bits(), u32::from(high) << 16);
        }
    }
}
