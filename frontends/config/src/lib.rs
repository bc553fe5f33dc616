//! The front end for `config.json`: the forward of a language model from its sizes alone.
//!
//! transformers saves such a file beside the weights of every model. It has a family's name
//! (`model_type`) and sizes. From these the reader builds the graph that a trace of the family's
//! `ForCausalLM` would give: the same formulas, and states with the paths of the model's own
//! parameters, so that its safetensors files fit. So a model can be planned, and trained, without
//! PyTorch.
//!
//! The graph is a forward with the output `logits`, in f32, without dropout. The file does not say
//! how large a batch is: the symbolic sizes `batch` and `sequence` do.

mod attention;
mod decoder;
mod families;
mod mlp;
mod net;
mod norm;
mod rotary;
mod settings;

use ir::Graph;
/// Why a file could not be read.
pub use lower::FileError as Error;
pub use lower::Tensor;
use settings::Settings;
use std::collections::BTreeMap;
use std::path::Path;

/// The names of the symbolic sizes: sequences of a step, and tokens of a sequence.
pub const DIMS: [&str; 2] = ["batch", "sequence"];

/// A model from its configuration.
#[derive(Clone, Debug)]
pub struct Model {
    /// The forward: inputs `input_ids`, and for packed documents `position_ids` and `segment_ids`;
    /// output `logits`.
    pub graph: Graph,
    /// Values of buffers, by path.
    pub tensors: BTreeMap<String, Tensor>,
    /// What the file asks for and the graph leaves out.
    pub notes: Vec<String>,
}

/// The families that can be read.
pub fn families() -> Vec<&'static str> {
    families::FAMILIES.iter().map(|(name, _)| *name).collect()
}

/// Reads a file. `dims` are the values of [`DIMS`]; without a value a batch is one sequence.
/// `packed` says that a sequence consists of documents that do not see each other: each token then
/// has a position in its document, and the number of its document, as inputs.
pub fn read(path: &Path, dims: &BTreeMap<String, u64>, packed: bool) -> Result<Model, Error> {
    let of = |e: Error| e.of(path.display().to_string());
    let bytes = std::fs::read(path).map_err(|e| of(Error::new("", e.to_string())))?;
    let text = String::from_utf8(bytes).map_err(|_| of(Error::new("", "not a text file")))?;
    parse(&text, dims, packed).map_err(of)
}

/// The same for the text of a file.
pub fn parse(text: &str, dims: &BTreeMap<String, u64>, packed: bool) -> Result<Model, Error> {
    if let Some(name) = dims.keys().find(|name| !DIMS.contains(&name.as_str())) {
        let known = DIMS.join(" and ");
        return Err(Error::new(
            "",
            format!("has no size {name}; its sizes are {known}"),
        ));
    }
    let settings = Settings::parse(text)?;
    let (decoder, notes) = families::decoder(settings)?;
    let batch = dims.get("batch").copied().unwrap_or(1);
    let Some(&sequence) = dims.get("sequence") else {
        return Err(Error::new("", "does not say how long a sequence is")
            .help("set it, such as --dim sequence=1024"));
    };
    if batch == 0 || sequence == 0 {
        return Err(Error::new("", "batch and sequence should be 1 or more"));
    }
    let (graph, tensors) = decoder.graph((batch, sequence), packed)?;
    Ok(Model {
        graph,
        tensors,
        notes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(sequence: u64) -> BTreeMap<String, u64> {
        BTreeMap::from([("sequence".to_string(), sequence)])
    }

    fn refused(text: &str, sizes: &BTreeMap<String, u64>) -> String {
        parse(text, sizes, false).unwrap_err().to_string()
    }

    #[test]
    fn what_is_wrong_is_named() {
        let says = |text: &str, words: &str| {
            let error = refused(text, &dims(8));
            assert!(error.contains(words), "{error}");
        };
        says("{", "line 1");
        says("[]", "not an object");
        says("{}", "no model_type");
        says(r#"{"model_type": "bert"}"#, "known are apertus, arcee");
        says(
            r#"{"model_type": "llama", "hidden_size": null}"#,
            "has no hidden_size",
        );
        says(r#"{"model_type": "gpt2", "n_embd": -1}"#, "n_embd: -1");
        says(r#"{"model_type": "gpt2", "n_embd": 770}"#, "cannot divide");
        says(r#"{"model_type": "gpt2", "n_layer": 1000000}"#, "n_layer");
        says(
            r#"{"model_type": "gpt2", "activation_function": "mish"}"#,
            "mish is not known",
        );
        says(r#"{"model_type": "gpt2", "n_positions": 4}"#, "for 4");
        let llama = |more: &str| {
            format!(
                r#"{{"model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
                "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9, {more}}}"#
            )
        };
        says(&llama(r#""pad_token_id": 9"#), "9 is no token");
        says(&llama(r#""num_key_value_heads": 4"#), "cannot share");
        let scaled = r#""rope_scaling": {"rope_type": "llama3", "factor": 0,
            "low_freq_factor": 1, "high_freq_factor": 4,
            "original_max_position_embeddings": 2}"#;
        says(&llama(scaled), "not finite");
        // Sizes that are allowed one by one, and too large together.
        let large = r#"{"model_type": "gpt2", "n_embd": 4294967296, "vocab_size": 4294967296}"#;
        assert!(!refused(large, &dims(8)).is_empty());
        let gpt2 = r#"{"model_type": "gpt2"}"#;
        assert!(refused(gpt2, &BTreeMap::new()).contains("--dim sequence="));
        assert!(refused(gpt2, &dims(0)).contains("1 or more"));
        let other = BTreeMap::from([("tokens".to_string(), 8)]);
        assert!(refused(gpt2, &other).contains("batch and sequence"));
    }

    #[test]
    fn what_is_left_out_is_noted() {
        let text = r#"{"model_type": "gpt2", "n_layer": 1, "resid_pdrop": 0.2}"#;
        let notes = parse(text, &dims(8), false).unwrap().notes;
        // The others are what transformers takes for a file without them.
        assert_eq!(notes.len(), 3);
        assert!(notes[2].contains("resid_pdrop 0.2"));
    }
}
