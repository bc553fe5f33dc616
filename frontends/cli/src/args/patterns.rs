//! The values of options that name parameters: patterns of their paths.

use glob::Pattern;

/// `PATTERN[|PATTERN..]:OPTION=VALUE,..` of `--group`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Group {
    pub(crate) patterns: Paths,
    pub(crate) options: Vec<(String, f64)>,
}

impl Group {
    /// Parses the value of the flag.
    pub(crate) fn parse(text: &str) -> Result<Group, String> {
        let bad = || format!("{text:?}: write PATTERN:OPTION=VALUE, as in *.bias:weight-decay=0");
        let (patterns, options) = text.rsplit_once(':').ok_or_else(bad)?;
        let option = |option: &str| -> Result<(String, f64), String> {
            let (name, value) = option.split_once('=').ok_or_else(bad)?;
            let value: f64 = value.trim().parse().map_err(|_| bad())?;
            if !value.is_finite() || value < 0.0 {
                return Err(format!("{text:?}: {value} is not a number from 0"));
            }
            Ok((name.trim().replace('-', "_"), value))
        };
        Ok(Group {
            patterns: Paths::parse(patterns)?,
            options: options.split(',').map(option).collect::<Result<_, _>>()?,
        })
    }
}

/// `PATTERN[|PATTERN..]`: `*` is any text, `?` any letter, `[ab]` one of these.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Paths {
    pub(crate) text: String,
    patterns: Vec<Pattern>,
}

impl Paths {
    /// Parses the value of a flag.
    pub(crate) fn parse(text: &str) -> Result<Paths, String> {
        let pattern = |text: &str| Pattern::new(text).map_err(|e| format!("{text:?}: {e}"));
        Ok(Paths {
            text: text.to_string(),
            patterns: text.split('|').map(pattern).collect::<Result<_, _>>()?,
        })
    }

    /// Whether a path matches.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.patterns.iter().any(|pattern| pattern.matches(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_patterns_and_options() {
        let group = Group::parse("*.bias|h.?.ln:weight-decay=0,lr=1e-4").unwrap();
        assert_eq!(
            group.options,
            [("weight_decay".to_string(), 0.0), ("lr".to_string(), 1e-4)]
        );
        assert!(group.patterns.has("h.1.fc.bias") && group.patterns.has("h.1.ln"));
        assert!(!group.patterns.has("h.1.fc.weight"));
        for bad in ["*.bias", "*:lr", "*:lr=x", "*:lr=-1", "[:lr=1", "*:lr=inf"] {
            assert!(Group::parse(bad).is_err(), "{bad}");
        }
    }
}
