//! The settings of a `config.json`, each read with its type.

use crate::Error;
use serde_json::{Map, Value as Json};

/// The largest size of a model that is built: above all published ones, and far below an overflow.
const LARGEST: u64 = 1 << 32;

/// A file's settings.
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

    /// A setting that is itself a set of settings; empty if it is absent.
    pub(crate) fn group(&self, key: &str) -> Result<Settings, Error> {
        match self.get(key) {
            None => Ok(Settings { all: Map::new() }),
            Some(Json::Object(all)) => Ok(Settings { all: all.clone() }),
            Some(value) => Err(Self::wrong(key, value, "a group of settings")),
        }
    }
}
