//! Bytes, rates and times: reads them from the command line and formats them for people.

use passes::pipeline::Budget;

/// A text that is no such quantity. The message says how to write one.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unreadable(String);

/// Units of bytes. Single letters mean powers of 1024, as in dumps.
const UNITS: [(&str, f64); 14] = [
    ("", 1.0),
    ("b", 1.0),
    ("k", 1024.0),
    ("kib", 1024.0),
    ("kb", 1e3),
    ("m", 1048576.0),
    ("mib", 1048576.0),
    ("mb", 1e6),
    ("g", 1073741824.0),
    ("gib", 1073741824.0),
    ("gb", 1e9),
    ("t", 1099511627776.0),
    ("tib", 1099511627776.0),
    ("tb", 1e12),
];

/// `20GiB`, `1.5 GB`, `64M`, `4096`.
pub fn parse_bytes(text: &str) -> Result<u64, Unreadable> {
    let bad = || {
        Unreadable(format!(
            "{text:?} is not a number of bytes: write 20GiB, 64MiB, 1.5GB or 4096"
        ))
    };
    let text = text.trim();
    if let Ok(bytes) = text.parse::<u64>() {
        return Ok(bytes);
    }
    let split = text
        .find(|c: char| c.is_ascii_alphabetic())
        .unwrap_or(text.len());
    let (number, unit) = (text[..split].trim(), text[split..].to_ascii_lowercase());
    // "1e9" is split at its e, and "inf" has no digits: neither is taken.
    let number: f64 = number.parse().map_err(|_| bad())?;
    // A fraction needs a unit: 0.5 alone is ambiguous.
    if unit.is_empty() {
        return Err(bad());
    }
    let (_, unit) = UNITS
        .iter()
        .find(|(name, _)| *name == unit)
        .ok_or_else(bad)?;
    let bytes = (number * unit).round();
    if !(0.0..9e18).contains(&bytes) {
        return Err(bad());
    }
    Ok(bytes as u64)
}

/// `60%`, or bytes.
pub fn parse_budget(text: &str) -> Result<Budget, Unreadable> {
    let Some(percent) = text.trim().strip_suffix('%') else {
        return match (parse_bytes(text), text.trim().parse::<f64>()) {
            (Ok(0), _) => Err(Unreadable("a budget of 0 bytes holds no step".into())),
            (Ok(bytes), _) => Ok(Budget::Bytes(bytes)),
            (Err(why), Ok(share)) if 0.0 < share && share < 1.0 => Err(Unreadable(format!(
                "{why}; for a share write {}%",
                (share * 1e4).round() / 1e2
            ))),
            (Err(why), _) => Err(why),
        };
    };
    match percent.trim().parse::<f64>() {
        Ok(percent) if percent.is_finite() && 0.0 < percent => Ok(Budget::Share(percent / 100.0)),
        _ => Err(Unreadable(format!("{text:?} is not a share: write 60%"))),
    }
}

/// `2GB/s`, in bytes per second.
pub fn parse_rate(text: &str) -> Result<f64, Unreadable> {
    let bad = || Unreadable(format!("{text:?} is not a rate: write 2GB/s or 500MB/s"));
    let amount = text.trim();
    let amount = amount.strip_suffix("/s").unwrap_or(amount);
    match parse_bytes(amount).map_err(|_| bad())? {
        0 => Err(bad()),
        rate => Ok(rate as f64),
    }
}

/// `7B`, `1.5B`, `350M`, `124439808`: a number of parameters, in powers of 1000.
pub fn parse_count(text: &str) -> Result<u64, Unreadable> {
    let bad = || {
        Unreadable(format!(
            "{text:?} is not a number of parameters: write 7B, 350M or 124439808"
        ))
    };
    let amount = text.trim();
    let units = [('k', 1e3), ('m', 1e6), ('b', 1e9), ('t', 1e12)];
    let last = amount.chars().last().map(|c| c.to_ascii_lowercase());
    let count = match units.into_iter().find(|&(unit, _)| Some(unit) == last) {
        None => amount.parse().map_err(|_| bad())?,
        Some((_, unit)) => {
            let number = &amount[..amount.len() - 1];
            if !number.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
                return Err(bad());
            }
            let count = (number.parse::<f64>().map_err(|_| bad())? * unit).round();
            // Above 2^53 a float does not hold every integer.
            if 9e15 < count {
                return Err(bad());
            }
            count as u64
        }
    };
    if count == 0 { Err(bad()) } else { Ok(count) }
}

/// `s72=4`.
pub fn parse_dim(text: &str) -> Result<(String, u64), Unreadable> {
    let bad = || {
        Unreadable(format!(
            "{text:?} is not a size: write NAME=SIZE, as in s72=4"
        ))
    };
    let (name, size) = text.split_once('=').ok_or_else(bad)?;
    let size = size.trim().parse().map_err(|_| bad())?;
    if name.trim().is_empty() {
        return Err(bad());
    }
    Ok((name.trim().to_string(), size))
}

/// `61.2 MiB (64172032 bytes)`.
pub fn bytes(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} byte{}", if bytes == 1 { "" } else { "s" });
    }
    format!("{} ({bytes} bytes)", short(bytes))
}

/// `61.2 MiB`.
pub fn short(bytes: u64) -> String {
    let units = [
        (1u64 << 40, "TiB"),
        (1 << 30, "GiB"),
        (1 << 20, "MiB"),
        (1 << 10, "KiB"),
    ];
    match units.into_iter().find(|&(unit, _)| unit <= bytes) {
        Some((unit, name)) => {
            let amount = bytes as f64 / unit as f64;
            let digits = if amount < 10.0 { 2 } else { 1 };
            format!("{amount:.digits$} {name}")
        }
        None => format!("{bytes} B"),
    }
}

/// `22.0 GB/s`: rates use powers of ten, as in data sheets.
pub fn rate(bytes_per_second: f64) -> String {
    format!("{}B/s", decimal(bytes_per_second))
}

/// `250 TFLOP/s`.
pub fn flops(per_second: f64) -> String {
    format!("{}FLOP/s", decimal(per_second))
}

/// Three digits and a prefix: `3.35 T`.
fn decimal(value: f64) -> String {
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let found = units.into_iter().find(|&(unit, _)| unit <= value);
    let (unit, name) = found.unwrap_or((1.0, ""));
    let digits = match value / unit {
        amount if amount < 10.0 => 2,
        amount if amount < 100.0 => 1,
        _ => 0,
    };
    format!("{:.digits$} {name}", value / unit)
}

/// `340.0 us`, `1.20 ms`, `3.40 s`.
pub fn micros(micros: f64) -> String {
    match micros {
        t if t < 1e3 => format!("{t:.1} us"),
        t if t < 1e6 => format!("{:.2} ms", t / 1e3),
        t => format!("{:.2} s", t / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_three_digits() {
        let written = [3.35e12, 2.2e10, 5e11, 1e9, 12.0].map(rate);
        let expected = [
            "3.35 TB/s",
            "22.0 GB/s",
            "500 GB/s",
            "1.00 GB/s",
            "12.0 B/s",
        ];
        assert_eq!(written, expected);
        assert_eq!(flops(6e10), "60.0 GFLOP/s");
    }

    #[test]
    fn bytes_are_read() {
        let cases = [
            ("0", 0),
            ("4096", 4096),
            ("64MiB", 64 << 20),
            ("20GiB", 20 << 30),
            ("1.5 GB", 1_500_000_000),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_bytes(text), Ok(expected), "{text}");
        }
        assert_eq!(parse_bytes("2k"), Ok(2048));
        assert_eq!(parse_bytes("18446744073709551615"), Ok(u64::MAX));
        for text in [
            "",
            "GiB",
            "-1",
            "1e9",
            "inf",
            "nan",
            "5 apples",
            "99999999TiB",
            "-1GiB",
            "ü",
        ] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn budgets_and_rates_are_read() {
        assert_eq!(parse_budget("60%"), Ok(Budget::Share(0.6)));
        assert_eq!(parse_budget("2MiB"), Ok(Budget::Bytes(2 << 20)));
        for text in ["0", "0%", "-5%", "nan%", "%", "inf%"] {
            assert!(parse_budget(text).is_err(), "{text}");
        }
        // Only what can be a share is taken for one, where a share can be given.
        let share = parse_budget("0.57").unwrap_err().to_string();
        assert!(share.ends_with("for a share write 57%"), "{share}");
        for text in ["-1", "-0.5", "1e30", "99999999999999999999"] {
            let why = parse_budget(text).unwrap_err().to_string();
            assert!(!why.contains("share"), "{why}");
        }
        let bytes = parse_bytes("0.57").unwrap_err().to_string();
        assert!(!bytes.contains("share"), "{bytes}");
        assert_eq!(parse_rate("2GB/s"), Ok(2e9));
        assert_eq!(parse_rate("500MB"), Ok(5e8));
        assert!(parse_rate("0GB/s").is_err());
        assert_eq!(parse_dim("s72=4"), Ok(("s72".into(), 4)));
        assert!(parse_dim("s72").is_err());
        assert!(parse_dim("=4").is_err());
    }

    #[test]
    fn counts_are_read() {
        let cases = [
            ("7B", 7_000_000_000),
            ("1.5b", 1_500_000_000),
            ("350M", 350_000_000),
            ("124439808", 124_439_808),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_count(text), Ok(expected), "{text}");
        }
        for text in [
            "",
            "B",
            "0",
            "-7B",
            "7e9B",
            "infB",
            "nan",
            "seven",
            "99999999T",
            "7 apples",
            "ü",
            "1.2.3B",
        ] {
            assert!(parse_count(text).is_err(), "{text}");
        }
    }

    #[test]
    fn bytes_are_written() {
        assert_eq!(short(0), "0 B");
        assert_eq!(short(1536), "1.50 KiB");
        assert_eq!(short(64 << 20), "64.0 MiB");
        assert_eq!(bytes(100), "100 bytes");
    }
}
