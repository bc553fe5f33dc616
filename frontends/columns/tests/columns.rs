//! Files that pyarrow wrote.

use crate::common::{Column, column, file};

/// The tokens of all files.
fn tokens() -> Vec<i64> {
    (0..296).map(|i| (7 * i * i + 13 * i) % 61).collect()
}

/// The ends of the lists of all files.
fn ends() -> Vec<usize> {
    let (mut ends, mut end) = (vec![], 0);
    for length in [7, 0, 13, 1, 30, 4, 64, 2].into_iter().cycle() {
        if end == 296 {
            break;
        }
        end = (end + length).min(296);
        ends.push(end);
    }
    ends
}

#[test]
fn lists_of_integers_are_read() {
    let expected = Column {
        integers: tokens(),
        ends: ends(),
    };
    for name in [
        "plain.parquet",
        "dictionary.parquet",
        "snappy.parquet",
        "gzip_v2.parquet",
        "lz4.parquet",
        "split_v2.parquet",
        "stream.arrow",
        "others.arrow",
        "stream_zstd.arrow",
        "polars.arrow",
    ] {
        assert_eq!(column(file(name), None).unwrap(), expected, "{name}");
    }
    let mask = column(file("snappy.parquet"), Some("attention_mask")).unwrap();
    assert_eq!(mask.integers, [1; 296]);
    assert_eq!(mask.ends, ends());

    let fixed = column(file("fixed_lz4.arrow"), None).unwrap();
    assert_eq!(fixed.integers, tokens());
    let ends: Vec<usize> = (1..=37).map(|k| 8 * k).collect();
    assert_eq!(fixed.ends, ends);

    // The first three rows are left out.
    let sliced = column(file("sliced.feather"), None).unwrap();
    assert_eq!(sliced.integers, tokens()[20..]);
}

#[test]
fn columns_of_integers_are_read() {
    for name in ["zstd_delta.parquet", "flat.arrow"] {
        let found = column(file(name), None).unwrap();
        assert_eq!(found.integers, tokens(), "{name}");
        assert_eq!(found.ends, [0; 0], "{name}");
    }
}

#[test]
fn nulls_are_told_by_their_rows() {
    for ending in ["parquet", "arrow"] {
        let refused = |name: &str, why: &str| {
            let error = column(file(&format!("{name}.{ending}")), None).unwrap_err();
            assert_eq!(error.to_string(), why, "{name}.{ending}");
        };
        refused("null_row", "row 2 of input_ids is null");
        refused("null_value", "row 2 of input_ids has a null");
        refused("null", "row 2 of tokens is null");
        let large = "row 2 of tokens has an integer that is larger than 63 bits";
        refused("large", large);
    }
}

#[test]
fn the_column_is_named_or_the_only_one() {
    for ending in ["parquet", "arrow"] {
        let several = || file(&format!("several.{ending}"));
        let refused = |bytes: Vec<u8>, name: Option<&str>, words: &[&str]| {
            let error = column(bytes, name).unwrap_err().to_string();
            for word in words {
                assert!(error.contains(word), "{word}: {error}");
            }
        };
        assert_eq!(column(several(), Some("a")).unwrap().integers, [1, 2]);
        let lists = column(several(), Some("b")).unwrap();
        assert_eq!((lists.integers, lists.ends), (vec![1, 2], vec![1, 2]));
        refused(
            several(),
            None,
            &["several", "--token-column", "a (int64)", "b (lists of "],
        );
        refused(several(), Some("d"), &["no column d", "c ("]);
        refused(several(), Some("c"), &["c has neither", "c ("]);
        let nested = || file(&format!("nested.{ending}"));
        refused(nested(), None, &["no column has", "lists of", "dates"]);
        refused(nested(), Some("input_ids"), &["input_ids has neither"]);
    }
    let brotli = column(file("brotli.parquet"), None).unwrap_err();
    assert!(brotli.to_string().contains("Brotli; write it with zstd"));
}
