//! Which files may run machine code, and the output of `inspect` for them.

use crate::common::{Folder, Run, command, mlp, run};
use artifact::{Artifact, CommandKind};
use std::collections::BTreeMap;
use std::process::Output;

/// A folder with a compiled step and a batch for it.
struct Steps {
    folder: Folder,
    batches: String,
}

impl Steps {
    fn new(name: &str) -> Steps {
        let folder = Folder::new(name);
        let bytes = crate::common::tensors(BTreeMap::from([(
            "batch.0.x",
            (vec![64, 64], vec![0.5; 4096]),
        )]));
        let batches = folder.write("b.safetensors", bytes);
        Steps { folder, batches }
    }
    /// Compiles the small graph.
    fn compile(&self, name: &str, rest: &str) -> String {
        let path = self.folder.file(name);
        run(&format!(
            "compile {} --optimizer adamw -o {path} {rest}",
            mlp()
        ))
        .expect(0);
        path
    }
    fn train(&self, lit: &str, rest: &str) -> String {
        let batches = &self.batches;
        format!("train {lit} --batches {batches} --init normal:0.1 --steps 2 {rest}")
    }
}

/// Runs the command as another user or on another machine: with another key.
fn elsewhere(args: &str, config: &str) -> Run {
    let Output {
        status,
        stdout,
        stderr,
    } = command(args)
        .env("LIGHTERAGE_CONFIG", config)
        .output()
        .unwrap();
    Run {
        code: status.code().unwrap_or(-1),
        out: String::from_utf8(stdout).unwrap(),
        err: String::from_utf8(stderr).unwrap(),
    }
}

#[test]
fn machine_code_runs_where_it_was_compiled_and_elsewhere_only_with_trust() {
    let steps = Steps::new("trust");
    let lit = steps.compile("s.lit", "");
    assert!(!artifact::read_file(&lit).unwrap().objects.is_empty());
    let args = steps.train(&lit, "");
    run(&args).expect(0);

    let config = steps.folder.file("config");
    let refused = elsewhere(&args, &config).expect(2);
    refused.says(&[
        "machine code",
        "--trust",
        "lighterage inspect",
        "--kernels plain",
    ]);
    elsewhere(&format!("{args} --trust"), &config).expect(0);

    // A file without a signature, which anybody can write.
    let unsigned = steps.folder.file("u.lit");
    artifact::write_file(&unsigned, &artifact::read_file(&lit).unwrap()).unwrap();
    run(&steps.train(&unsigned, ""))
        .expect(2)
        .says(&["no signature", "--trust"]);
    run(&steps.train(&unsigned, "--trust")).expect(0);

    // A file with the right signature of another body.
    let mut other: Artifact = artifact::read_file(&lit).unwrap();
    other.lines[0].name.push('!');
    let changed = steps.folder.file("c.lit");
    let signed = std::fs::read(&lit).unwrap();
    let signature: [u8; 20] = signed[40..60].try_into().unwrap();
    assert_ne!(signature, artifact::UNSIGNED);
    artifact::write_signed_file(&changed, &other, |_| signature).unwrap();
    run(&steps.train(&changed, ""))
        .expect(2)
        .says(&["signature is not yours"]);
}

#[test]
fn a_key_that_others_can_write_signs_nothing() {
    use std::os::unix::fs::PermissionsExt;
    let steps = Steps::new("key");
    let config = steps.folder.file("config");
    let lit = steps.folder.file("s.lit");
    let compile = format!("compile {} -o {lit}", mlp());
    elsewhere(&compile, &config).expect(0);
    let mode = |path: &str| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let key = format!("{config}/key");
    assert_eq!((mode(&config), mode(&key)), (0o700, 0o600));
    assert_eq!(std::fs::read_dir(&config).unwrap().count(), 1);

    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o666)).unwrap();
    elsewhere(&compile, &config)
        .expect(0)
        .says(&["is not signed", "chmod go-w"]);
    elsewhere(&steps.train(&lit, ""), &config)
        .expect(2)
        .says(&["--trust"]);
}

#[test]
fn plain_kernels_need_no_trust_and_options_that_do_nothing_are_refused() {
    let steps = Steps::new("plain");
    let (code, plain) = (
        steps.compile("c.lit", ""),
        steps.compile("p.lit", "--kernels plain"),
    );
    let config = steps.folder.file("config");
    elsewhere(&steps.train(&plain, "--kernels plain"), &config).expect(0);
    assert!(
        !std::path::Path::new(&config).exists(),
        "nothing was signed"
    );
    for (lit, option) in [
        (&code, "--kernels plain"),
        (&plain, "--kernels generated"),
        (&code, "--loss-chunks 2"),
        (&code, "--loss-chunks auto"),
        (&code, "--master split"),
        (&code, "--time-passes"),
    ] {
        let name = option.split(' ').next().unwrap();
        run(&steps.train(lit, option))
            .expect(2)
            .says(&[name, "compile the model again"]);
    }
    run(&steps.train(&code, "--kernels generated")).expect(0);
    let args = format!(
        "train {} --batches {} --steps 1 --trust",
        mlp(),
        steps.batches
    );
    run(&args).expect(2).says(&["--trust", ".lit"]);
}

#[test]
fn what_a_file_has_is_said_without_running_it() {
    let steps = Steps::new("inspect");
    let (code, plain) = (
        steps.compile("c.lit", ""),
        steps.compile("p.lit", "--kernels plain"),
    );
    let out = run(&format!("inspect {code}")).expect(0).out;
    for words in [
        "you compiled it here",
        "pool",
        "device",
        "parameter",
        "moment",
        "adamw",
        "loss f32[]",
    ] {
        assert!(out.contains(words), "{words}:\n{out}");
    }
    let out = run(&format!("inspect {plain}")).expect(0).out;
    assert!(
        out.contains("none: it runs the runtime's own kernels only"),
        "{out}"
    );

    let json = &run(&format!("inspect {code} --json")).expect(0).json()[0];
    assert_eq!(
        (&json["machine_code"], &json["signed"]),
        (&true.into(), &"here".into())
    );
    assert_eq!(
        (&json["runs"], &json["inputs"][0]["type"]),
        (&true.into(), &"f32[64,64]".into())
    );
    let other = elsewhere(
        &format!("inspect {code} --json"),
        &steps.folder.file("config"),
    );
    assert_eq!(other.expect(0).json()[0]["signed"], "elsewhere");

    // `inspect` also reports files that cannot be run, and does not fail.
    let mut broken = artifact::read_file(&plain).unwrap();
    for command in &mut broken.commands {
        if let CommandKind::Launch { outs, .. } = &mut command.kind {
            outs.iter_mut().for_each(|out| out.place.offset += 1);
        }
    }
    let path = steps.folder.file("broken.lit");
    artifact::write_file(&path, &broken).unwrap();
    let json = &run(&format!("inspect {path} --json")).expect(0).json()[0];
    assert_eq!(json["runs"], false);
    assert!(json["why_not"].as_str().unwrap().contains("multiple of 64"));
    run(&format!("inspect {}", mlp()))
        .expect(2)
        .says(&["not a .lit file"]);
}
