//! Which adapters a forward gets, as options or as the file that PEFT writes.

use passes::graph::lora::Lora;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The name of PEFT's file.
pub(crate) const CONFIG: &str = "adapter_config.json";

/// Its settings that are read.
const READ: [&str; 6] = [
    "lora_alpha",
    "lora_dropout",
    "peft_type",
    "r",
    "target_modules",
    "use_rslora",
];
/// Its settings that change no result of a model whose adapters have values: where it comes from,
/// how a library stores it, how values are drawn.
const UNUSED: [&str; 16] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
];

/// The value of the option.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AddLora {
    rank: u64,
    alpha: f64,
    /// The factor is `alpha / sqrt(rank)` instead of `alpha / rank`.
    by_root: bool,
    targets: Vec<String>,
    /// The share of the elements of an adapter's operand that is dropped.
    dropout: f64,
}

impl AddLora {
    /// Parses `r=16,alpha=32,dropout=0.05,targets=q_proj|v_proj`, or reads a file of PEFT or its
    /// folder.
    pub(crate) fn parse(text: &str) -> Result<AddLora, String> {
        let path = Path::new(text);
        if path.is_dir() || path.extension().is_some_and(|name| name == "json") {
            let file = match path.is_dir() {
                true => path.join(CONFIG),
                false => PathBuf::from(path),
            };
            let of_file = |e: String| format!("{}: {e}", file.display());
            let bytes = std::fs::read(&file).map_err(|e| of_file(e.to_string()))?;
            let config: Value =
                serde_json::from_slice(&bytes).map_err(|e| of_file(e.to_string()))?;
            return AddLora::of_peft(&config).map_err(of_file);
        }
        let mut added = AddLora {
            rank: 8,
            alpha: f64::NAN,
            by_root: false,
            targets: vec![],
            dropout: 0.0,
        };
        for option in text.split(',') {
            let bad = || {
                format!("{option:?}: write r=16,alpha=32,targets=q_proj|v_proj, or name {CONFIG}")
            };
            let (name, value) = option.split_once('=').ok_or_else(bad)?;
            match name.trim() {
                "r" => added.rank = value.trim().parse().map_err(|_| bad())?,
                "alpha" => added.alpha = value.trim().parse().map_err(|_| bad())?,
                "dropout" => added.dropout = value.trim().parse().map_err(|_| bad())?,
                "targets" => added.targets = value.split('|').map(str::to_string).collect(),
                _ => return Err(bad()),
            }
        }
        if added.alpha.is_nan() {
            added.alpha = added.rank as f64;
        }
        added.checked()
    }

    /// What PEFT's file says.
    fn of_peft(config: &Value) -> Result<AddLora, String> {
        let settings = config.as_object().ok_or("not an object")?;
        let kind = settings.get("peft_type").and_then(Value::as_str);
        if kind != Some("LORA") {
            return Err("peft_type should be LORA".into());
        }
        // The values with which a setting changes nothing.
        let plain = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(items) => items.is_empty(),
            Value::String(text) => text == "none",
            _ => false,
        };
        let unknown = settings.iter().find(|(name, value)| {
            let name = name.as_str();
            !READ.contains(&name) && !UNUSED.contains(&name) && !plain(value)
        });
        if let Some((name, value)) = unknown {
            return Err(format!(
                "{name}: {value} cannot be added to a forward; let PEFT add it, and export the \
                 model with export_joint"
            ));
        }
        let number = |name: &str, none: f64| settings.get(name).map_or(Some(none), Value::as_f64);
        let wrong = |name: &str| format!("{name}: not a number");
        let rank = settings.get("r").map_or(Some(8), Value::as_u64);
        let targets = match settings.get("target_modules") {
            None | Some(Value::Null) => {
                return Err("no target_modules; PEFT writes them when it saves".into());
            }
            Some(Value::String(all)) if all == "all-linear" => vec![],
            Some(Value::Array(names)) => {
                let names = names.iter().filter_map(Value::as_str);
                names.map(str::to_string).collect()
            }
            Some(other) => {
                return Err(format!(
                    "target_modules: {other} is not a list of names or \"all-linear\""
                ));
            }
        };
        let added = AddLora {
            rank: rank.ok_or("r: not a whole number from 1")?,
            alpha: number("lora_alpha", 8.0).ok_or_else(|| wrong("lora_alpha"))?,
            by_root: settings.get("use_rslora") == Some(&Value::Bool(true)),
            targets,
            dropout: number("lora_dropout", 0.0).ok_or_else(|| wrong("lora_dropout"))?,
        };
        added.checked()
    }

    fn checked(mut self) -> Result<AddLora, String> {
        self.targets.sort_unstable();
        if !self.alpha.is_finite() || self.rank == 0 {
            return Err(format!(
                "r={}, alpha={}: the rank is 1 or more, and alpha a number",
                self.rank, self.alpha
            ));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(format!(
                "dropout={}: it is at least 0 and less than 1",
                self.dropout
            ));
        }
        Ok(self)
    }

    /// What the graph gets.
    pub(crate) fn to_graph(&self) -> Lora {
        let rank = self.rank as f64;
        Lora {
            rank: self.rank,
            scale: self.alpha / if self.by_root { rank.sqrt() } else { rank },
            dropout: self.dropout,
            targets: self.targets.clone(),
        }
    }

    /// PEFT's file with these adapters, so that it reads what is saved beside it.
    pub(crate) fn to_peft(&self) -> String {
        let targets = match self.targets.is_empty() {
            true => json!("all-linear"),
            false => json!(self.targets),
        };
        let config = json!({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": null,
            "r": self.rank, "lora_alpha": self.alpha, "lora_dropout": self.dropout,
            "target_modules": targets, "use_rslora": self.by_root, "bias": "none",
            "inference_mode": true,
        });
        format!("{config:#}\n")
    }
}
