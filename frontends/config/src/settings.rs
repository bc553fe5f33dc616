//! The settings of a `config.json`, each read with its type.

use crate::Error;
use serde_json::{Map, Value as Json};

/// The largest size of a model that is built: above all published ones, and far below an overflow.
const LARGEST: u64 = 1 << 32;

/// What helps where this reader has no graph.
pub(crate) const TRACE: &str = "trace the model in PyTorch, by lighterage.export";

/// The error that a setting of a family has no graph here.
pub(crate) fn no_graph(key: &str, setting: impl std::fmt::Display) -> Error {
    Error::new(key, format!("{setting} has no graph here")).help(TRACE)
}

/// The key of a family's second names of settings.
const RENAMED: &str = "attribute_map";

/// A file's settings.
#[derive(Clone, Default)]
pub(crate) struct Settings {
    all: Map<String, Json>,
}

impl Settings {
    pub(crate) fn parse(text: &str) -> Result<Settings, Error> {
        match serde_json::from_str(text) {
            Ok(Json::Object(all)) => Ok(Settings { all }),
            Ok(_) => Err(Error::new("", "is not an object of settings")),
            Err(e) => Err(Error::line(e.line(), e.to_string())),
        }
    }

    /// The settings with those of `defaults` that they lack. Names of `renamed` give way to others.
    pub(crate) fn completed(mut self, defaults: &Map<String, Json>) -> Settings {
        if let Some(Json::Object(renamed)) = defaults.get(RENAMED) {
            for (old, new) in renamed {
                let new = new.as_str().unwrap_or(old);
                if let Some(value) = self.all.remove(old) {
                    self.all.insert(new.to_string(), value);
                }
            }
        }
        for (key, value) in defaults.iter().filter(|(key, _)| *key != RENAMED) {
            if !self.all.contains_key(key) {
                self.all.insert(key.clone(), value.clone());
            }
        }
        self
    }

    /// The settings with others, which come first.
    pub(crate) fn with(mut self, others: Settings) -> Settings {
        self.all.extend(others.all);
        self
    }

    /// The settings with a number if they lack it.
    pub(crate) fn or_number(mut self, key: &str, number: impl Into<Json>) -> Settings {
        if !self.has(key) {
            self.all.insert(key.to_string(), number.into());
        }
        self
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// A setting that is there and not null.
    fn get(&self, key: &str) -> Option<&Json> {
        self.all.get(key).filter(|value| !value.is_null())
    }

    fn wrong(key: &str, value: &Json, expected: &str) -> Error {
        Error::new(key, format!("{value} is not {expected}"))
    }

    /// A size of at least 1.
    pub(crate) fn size(&self, key: &str) -> Result<u64, Error> {
        self.size_or_none(key)?
            .ok_or_else(|| Error::new("", format!("has no {key}")))
    }

    pub(crate) fn size_or(&self, key: &str, default: u64) -> Result<u64, Error> {
        Ok(self.size_or_none(key)?.unwrap_or(default))
    }

    pub(crate) fn size_or_none(&self, key: &str) -> Result<Option<u64>, Error> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_u64() {
            Some(size) if (1..=LARGEST).contains(&size) => Ok(Some(size)),
            _ => Err(Self::wrong(key, value, "a size from 1 to 2^32")),
        }
    }

    /// A number of things, which may be 0.
    pub(crate) fn count_or(&self, key: &str, default: u64) -> Result<u64, Error> {
        let Some(value) = self.get(key) else {
            return Ok(default);
        };
        match value.as_u64() {
            Some(count) if count <= LARGEST => Ok(count),
            _ => Err(Self::wrong(key, value, "a number from 0 to 2^32")),
        }
    }

    /// A size that the file may repeat for each layer.
    pub(crate) fn same_size(&self, key: &str) -> Result<u64, Error> {
        let Some(Json::Array(sizes)) = self.get(key) else {
            return self.size(key);
        };
        match sizes.first() {
            Some(first) if sizes.iter().all(|size| size == first) => {
                let all = [(key.to_string(), first.clone())].into_iter().collect();
                Settings { all }.size(key)
            }
            _ => Err(no_graph(key, "a list of different sizes")),
        }
    }

    /// A token's number.
    pub(crate) fn token(&self, key: &str) -> Result<Option<u64>, Error> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_i64() {
            // Some files say -1 for none.
            Some(-1) => Ok(None),
            Some(token) if (0..LARGEST as i64).contains(&token) => Ok(Some(token as u64)),
            _ => Err(Self::wrong(key, value, "the number of a token")),
        }
    }

    pub(crate) fn number_or(&self, key: &str, default: f64) -> Result<f64, Error> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_f64()
                .ok_or_else(|| Self::wrong(key, value, "a number")),
        }
    }

    pub(crate) fn number(&self, key: &str) -> Result<f64, Error> {
        match self.get(key) {
            None => Err(Error::new("", format!("has no {key}"))),
            Some(_) => self.number_or(key, 0.0),
        }
    }

    pub(crate) fn flag_or(&self, key: &str, default: bool) -> Result<bool, Error> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| Self::wrong(key, value, "true or false")),
        }
    }

    pub(crate) fn text_or<'s>(&'s self, key: &str, default: &'s str) -> Result<&'s str, Error> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_str()
                .ok_or_else(|| Self::wrong(key, value, "a text")),
        }
    }

    /// A number that may be absent.
    pub(crate) fn number_or_none(&self, key: &str) -> Result<Option<f64>, Error> {
        match self.has(key) {
            true => self.number(key).map(Some),
            false => Ok(None),
        }
    }

    /// An error if a flag that this reader has no graph for is not `value`.
    pub(crate) fn only_flag(&self, key: &str, value: bool) -> Result<(), Error> {
        match self.flag_or(key, value)? == value {
            true => Ok(()),
            false => Err(no_graph(key, !value)),
        }
    }

    /// A list of numbers.
    pub(crate) fn numbers(&self, key: &str) -> Result<Vec<f64>, Error> {
        let Some(value) = self.get(key) else {
            return Err(Error::new("", format!("has no {key}")));
        };
        let list = value.as_array().map(|list| list.iter().map(Json::as_f64));
        list.and_then(|numbers| numbers.collect::<Option<Vec<f64>>>())
            .ok_or_else(|| Self::wrong(key, value, "a list of numbers"))
    }

    /// A list of texts.
    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&str>>, Error> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let list = value.as_array().map(|list| list.iter().map(Json::as_str));
        list.and_then(|texts| texts.collect::<Option<Vec<&str>>>())
            .map(Some)
            .ok_or_else(|| Self::wrong(key, value, "a list of texts"))
    }

    /// Lists of texts, each with how often it is repeated: `[[["a", "b"], 2], ..]`.
    pub(crate) fn repeated_texts(&self, key: &str) -> Result<Option<Vec<&str>>, Error> {
        /// More than any model has layers.
        const MOST: usize = 10_001;
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let wrong = || Self::wrong(key, value, "lists of texts and how often they are repeated");
        let mut all = vec![];
        for item in value.as_array().ok_or_else(wrong)? {
            let texts = item.get(0).and_then(Json::as_array).ok_or_else(wrong)?;
            let times = item.get(1).and_then(Json::as_u64).ok_or_else(wrong)?;
            let texts: Option<Vec<&str>> = texts.iter().map(Json::as_str).collect();
            let texts = texts.ok_or_else(wrong)?;
            let room = MOST.saturating_sub(all.len());
            let repeated = texts
                .iter()
                .cycle()
                .take(texts.len() * times.min(MOST as u64) as usize);
            all.extend(repeated.take(room));
        }
        Ok(Some(all))
    }

    /// A setting that is itself a set of settings; empty if it is absent.
    pub(crate) fn group(&self, key: &str) -> Result<Settings, Error> {
        match self.get(key) {
            None => Ok(Settings::default()),
            Some(Json::Object(all)) => Ok(Settings { all: all.clone() }),
            Some(value) => Err(Self::wrong(key, value, "a group of settings")),
        }
    }
}
