//! Bits of bytes, the lowest first.

/// `width` bits from position `bit`, at most 64; `None` beyond the end.
pub(crate) fn at(bytes: &[u8], bit: u64, width: u32) -> Option<u64> {
    let first = usize::try_from(bit / 8).ok()?;
    let shift = (bit % 8) as u32;
    let mask = u64::MAX.checked_shr(64 - width).unwrap_or(0);

    // Most reads are of few bits, far from the end.
    if shift + width <= 64
        && let Some(eight) = bytes.get(first..).and_then(|rest| rest.first_chunk::<8>())
    {
        return Some(u64::from_le_bytes(*eight) >> shift & mask);
    }
    let n = (shift + width).div_ceil(8) as usize;
    let read = bytes.get(first..)?.get(..n)?;
    let wide = read
        .iter()
        .rev()
        .fold(0u128, |wide, &byte| wide << 8 | u128::from(byte));
    Some((wide >> shift) as u64 & mask)
}

/// A number in groups of 7 bits, the lowest first, and the bytes after it.
pub(crate) fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0;
    for (i, &byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7F) << (7 * i);
        if byte & 0x80 == 0 {
            return Some((value, &bytes[i + 1..]));
        }
    }
    None
}

/// A signed number whose lowest bit is its sign.
pub(crate) fn zigzag(value: u64) -> i64 {
    (value >> 1) as i64 ^ -((value & 1) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_read_up_to_the_last() {
        let bytes: Vec<u8> = (1..=12).collect();
        let all = bytes
            .iter()
            .rev()
            .fold(0u128, |n, &b| n << 8 | u128::from(b));
        for bit in 0..=96u64 {
            for width in 0..=64u32 {
                let expected = (bit + u64::from(width) <= 96).then(|| {
                    (all.checked_shr(bit as u32).unwrap_or(0) & ((1 << width) - 1)) as u64
                });
                assert_eq!(at(&bytes, bit, width), expected, "{bit} {width}");
            }
        }
    }

    #[test]
    fn numbers_of_groups_are_read() {
        assert_eq!(varint(&[0x96, 1, 7]), Some((150, &[7u8][..])));
        assert_eq!(varint(&[0x80]), None);
        assert_eq!(varint(&[0xFF; 11]), None);
        assert_eq!([0, 1, 2, 3].map(zigzag), [0, -1, 1, -2]);
        assert_eq!(zigzag(u64::MAX), i64::MIN);
    }
}
