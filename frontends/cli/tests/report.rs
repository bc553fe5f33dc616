//! Other budgets and the report: `plan --curve`, `--curve-svg`, `--report`.

use crate::common::{Folder, mlp, model, run};
use serde_json::Value as Json;
use std::collections::BTreeSet;
use std::io::Write;
use std::process::Command;

const GPT2: &str = "gpt2-tiny/joint_core.pt2";

/// The curve that `plan --json` gives.
fn curve(args: &str) -> Vec<(u64, f64)> {
    let object = &run(&format!("plan {args} --json")).expect(0).json()[0];
    let points = object["curve"].as_array().unwrap().iter();
    points
        .map(|p| {
            (
                p["budget_bytes"].as_u64().unwrap(),
                p["predicted_ms"].as_f64().unwrap(),
            )
        })
        .collect()
}

#[test]
fn fewer_bytes_are_never_faster() {
    for (source, options) in [
        (mlp(), "--optimizer adamw --device test"),
        (model(GPT2), "--optimizer adamw --budget 60%"),
        (model("llama-tiny/joint_core.pt2"), "--optimizer sgd"),
        (
            model("resnet-tiny/joint_core.pt2"),
            "--optimizer sgd-momentum --device test",
        ),
    ] {
        let curve = curve(&format!("{source} {options}"));
        assert!(1 < curve.len(), "{source}: {curve:?}");
        for pair in curve.windows(2) {
            assert!(
                pair[1].0 < pair[0].0 && pair[0].1 <= pair[1].1,
                "{source}: {pair:?}"
            );
        }
    }
}

#[test]
fn a_point_of_the_curve_is_what_its_budget_gives() {
    let args = format!("{} --optimizer adamw --device test", mlp());
    let curve = curve(&args);
    for &(bytes, millis) in [&curve[0], &curve[curve.len() / 2], &curve[curve.len() - 1]] {
        let object = &run(&format!("plan {args} --budget {bytes} --json"))
            .expect(0)
            .json()[0];
        assert_eq!(object["predicted_ms"].as_f64().unwrap(), millis, "{bytes}");
        let points = object["curve"].as_array().unwrap();
        let chosen: Vec<&Json> = points.iter().filter(|p| p["chosen"] == true).collect();
        assert_eq!(chosen.len(), 1);
        assert_eq!(chosen[0]["budget_bytes"], bytes);
        assert_eq!(chosen[0]["host_peak_bytes"], object["host_peak_bytes"]);
        // One byte less is slower, or nothing fits.
        let less = run(&format!("plan {args} --budget {} --json", bytes - 1));
        assert!(
            less.code == 3 || millis < less.json()[0]["predicted_ms"].as_f64().unwrap(),
            "{bytes}"
        );
    }
}

#[test]
fn the_whole_curve_is_printed_where_it_is_asked_for() {
    let args = format!("plan {} --optimizer adamw --budget 50%", model(GPT2));
    let points = run(&format!("{args} --json")).expect(0).json()[0]["curve"]
        .as_array()
        .unwrap()
        .len();
    let whole = run(&format!("{args} --curve")).expect(0).out;
    let rows = |text: &str| {
        text.lines()
            .skip_while(|line| !line.contains("predicted step") || !line.contains("budget"))
            .skip(1)
            .take_while(|line| !line.is_empty())
            .count()
    };
    assert_eq!(rows(&whole), points);
    assert_eq!(whole.matches("< chosen: host peak").count(), 1, "{whole}");
    assert!(whole.contains("1% less costs"), "{whole}");
    let chosen = run(&args).expect(0).out;
    assert!(!chosen.contains("1% less costs"), "{chosen}");
    // No two rows print alike, although many budgets differ by little.
    for text in [&whole, &chosen] {
        let rows: Vec<&str> = text.lines().filter(|line| line.contains('%')).collect();
        let distinct: BTreeSet<&&str> = rows.iter().collect();
        assert_eq!(distinct.len(), rows.len(), "{text}");
    }
}

#[test]
fn the_curve_is_drawn() {
    let folder = Folder::new("curve");
    let file = folder.file("curve.svg");
    let args = format!(
        "plan {} --optimizer adamw --budget 50% --curve-svg {file}",
        model(GPT2)
    );
    let points = run(&format!("{args} --json")).expect(0).json()[0]["curve"]
        .as_array()
        .unwrap()
        .len();
    let svg = std::fs::read_to_string(&file).unwrap();
    let tags = balanced(&svg);
    assert_eq!(tags[0], "svg");
    assert_eq!(tags.iter().filter(|tag| *tag == "circle").count(), points);
    assert_eq!(svg.matches("class=\"chosen\"").count(), 1);
    assert!(
        svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\"") && svg.contains("budget, KiB"),
        "{svg}"
    );
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    assert_eq!(
        folder.names(),
        ["curve.svg"],
        "no temporary file should be left"
    );
}

#[test]
fn the_page_has_the_figures_and_needs_nothing_else() {
    let folder = Folder::new("page");
    let file = folder.file("plan.html");
    let args = format!("plan {} --optimizer adamw --budget 50%", model(GPT2));
    let told = run(&args).expect(0).out;
    let reported = run(&format!("{args} --report {file}")).expect(0);
    assert_eq!(reported.out, told, "the report to people should not change");
    assert_eq!(
        folder.names(),
        ["plan.html"],
        "no temporary file should be left"
    );
    let page = std::fs::read_to_string(&file).unwrap();

    for words in [
        &format!("<code>lighterage {args} --report {file}</code>"),
        "memory bandwidth",
        "start of a kernel",
    ] {
        assert!(page.contains(words), "{words}");
    }
    let tags = balanced(&page);
    for (tag, n) in [
        ("html", 1),
        ("h1", 1),
        ("canvas", 3),
        ("svg", 1),
        ("script", 2),
        ("style", 1),
    ] {
        assert_eq!(tags.iter().filter(|t| *t == tag).count(), n, "{tag}");
    }
    for outside in [
        "http://", "https://", "//cdn", " src=", " href=", "@import", "url(",
    ] {
        assert!(!page.contains(outside), "{outside}");
    }

    // The page has the figures that `plan` prints.
    let object = &run(&format!("{args} --json")).expect(0).json()[0];
    let figure = |name: &str| {
        let row = told
            .lines()
            .find(|line| line.trim_start().starts_with(name))
            .unwrap_or_else(|| panic!("{name}:\n{told}"));
        row.trim_start()[name.len()..]
            .split_whitespace()
            .take(2)
            .collect::<Vec<_>>()
            .join(" ")
    };
    for name in [
        "planned peak",
        "budget",
        "in use at the peak",
        "smallest feasible",
        "keep everything",
        "host peak",
        "predicted step",
    ] {
        let cell = format!(
            "<dt>{name}</dt><dd><b>{}</b>",
            figure(name).replace(" us", " µs")
        );
        assert!(page.contains(&cell), "{cell}");
    }

    let data = data(&page);
    assert_eq!(data["planned_peak"], object["planned_peak_bytes"]);
    assert_eq!(data["curve"], object["curve"]);
    let length = |path: &str| data.pointer(path).unwrap().as_array().unwrap().len();
    let lines = object["lines"].as_u64().unwrap() as usize;
    for column in [
        "stream", "kind", "start", "end", "name", "op", "module", "bytes",
    ] {
        assert_eq!(length(&format!("/lines/{column}")), lines, "{column}");
    }
    for column in ["pool", "class", "bytes", "from", "to", "name", "module"] {
        assert_eq!(
            length(&format!("/stays/{column}")),
            length("/stays/pool"),
            "{column}"
        );
    }
    let decided = &object["decisions"];
    let counted: u64 = ["swap", "recompute", "hosted_states"]
        .iter()
        .map(|k| decided[k]["count"].as_u64().unwrap())
        .sum();
    // A state on the host is one decision, even if it comes more than once in a step.
    assert_eq!(length("/decisions") as u64, counted);
    let words = length("/words") as u64;
    for pointer in [
        "/lines/name",
        "/lines/op",
        "/lines/module",
        "/stays/name",
        "/stays/module",
    ] {
        assert!(
            data.pointer(pointer)
                .unwrap()
                .as_array()
                .unwrap()
                .iter()
                .all(|word| word.as_u64().unwrap() < words)
        );
    }
}

#[test]
fn what_is_drawn_lies_within_what_is_planned() {
    let folder = Folder::new("within");
    for (name, source, options) in [
        ("a", model(GPT2), "--optimizer adamw --budget 100%"),
        ("b", model(GPT2), "--optimizer adamw --budget 30%"),
        (
            "c",
            model("llama-tiny/joint_core.pt2"),
            "--optimizer sgd --budget 40%",
        ),
        ("d", mlp(), "--optimizer adamw --device test --budget 70%"),
    ] {
        let file = folder.file(&format!("{name}.html"));
        let object = &run(&format!("plan {source} {options} --report {file} --json"))
            .expect(0)
            .json()[0];
        let data = data(&std::fs::read_to_string(&file).unwrap());
        let step = data["step"].as_f64().unwrap();
        for (pool, planned) in [(0, "planned_peak_bytes"), (1, "host_peak_bytes")] {
            let column = |name: &str| data["stays"][name].as_array().unwrap();
            let mut changes: Vec<(f64, i64)> = vec![];
            for k in (0..column("pool").len()).filter(|&k| column("pool")[k] == pool) {
                let (from, to) = (
                    column("from")[k].as_f64().unwrap(),
                    column("to")[k].as_f64().unwrap(),
                );
                let bytes = column("bytes")[k].as_i64().unwrap();
                assert!(
                    0.0 <= from && from <= to && to <= step,
                    "{source}: {from}..{to} of {step}"
                );
                changes.extend([(from, bytes), (to, -bytes)]);
            }
            changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            let mut now = 0;
            let most = changes
                .iter()
                .map(|&(_, change)| {
                    now += change;
                    now
                })
                .max()
                .unwrap();
            assert_eq!(now, 0);
            // Places do not overlap, so the bytes at any moment cannot exceed the pool.
            assert!(
                most <= object[planned].as_i64().unwrap(),
                "{source} {options}: {most} of {}",
                object[planned]
            );
            assert!(0 < most);
            if pool == 0 {
                assert_eq!(data["peak"]["bytes"], most);
            }
        }
    }
}

#[test]
fn names_are_text_whatever_they_hold() {
    const HOSTILE: &str =
        "</script><script>alert(1)</script><img src=x onerror=alert(1)> \" ' & ${1} <!--";
    let folder = Folder::new("hostile");
    let quoted = HOSTILE.replace('\\', "\\\\").replace('"', "\\\"");
    let text = std::fs::read_to_string(mlp()).unwrap();
    // The model, a module, a parameter's path, a value: names that a file may choose.
    let hostile = text
        .replacen("graph mlp", &format!("graph \"{quoted}\""), 1)
        .replace("\"fc1.weight\"", &format!("\"fc1.{quoted}.weight\""))
        .replace("fwd fc1 ", &format!("fwd \"{quoted}\" "))
        .replace("%h ", &format!("%\"{quoted}\" "))
        .replace("%h,", &format!("%\"{quoted}\","))
        .replace("%h\n", &format!("%\"{quoted}\"\n"));
    assert_ne!(hostile, text);
    let file = folder.write("hostile.ir", &hostile);
    let device = "name = \"NAME\"\ndevice_bytes = 200000\nhost_bytes = 1000000\nf32_flops = \
        1e9\nbf16_flops = 1e9\n\
                  memory_bandwidth = 1e9\nlaunch_micros = 1.0\nlink_bandwidth = 1e9\nduplex = \
                  1.0\nlink_micros = 1.0\n\
                  host_bandwidth = 1e9\n";
    let device = folder.write(
        "device.toml",
        device.replace("\"NAME\"", &format!("\"{quoted}\"")),
    );
    let page_file = folder.file("plan.html");
    let args = format!(
        "--optimizer adamw --budget 70% --device {device} --curve-svg {}",
        folder.file("c.svg")
    );
    run(&format!("plan {file} {args} --report {page_file}")).expect(0);
    let page = std::fs::read_to_string(&page_file).unwrap();
    let tags = balanced(&page);
    assert_eq!(tags.iter().filter(|tag| *tag == "script").count(), 2);
    assert!(!tags.iter().any(|tag| tag == "img"), "{tags:?}");
    assert!(
        !page.contains("<img") && !page.contains("<script>alert"),
        "a name should not be markup"
    );
    let data = data(&page);
    assert_eq!(
        (&data["model"], &data["device"]),
        (&HOSTILE.into(), &HOSTILE.into())
    );
    assert!(
        data["words"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|word| word.as_str().unwrap().contains(HOSTILE))
            .count()
            != 0
    );
    balanced(&std::fs::read_to_string(folder.file("c.svg")).unwrap());
}

#[test]
fn a_place_that_cannot_be_written_is_told_before_the_work() {
    let folder = Folder::new("unwritable");
    // The model does not exist: a command that had begun to work would report this.
    for option in ["--report", "--curve-svg"] {
        run(&format!(
            "plan missing.pt2 {option} {}",
            folder.file("none/plan.html")
        ))
        .expect(2)
        .says(&[option, "none"]);
        run(&format!("plan missing.pt2 {option} {}", folder.file("")))
            .expect(2)
            .says(&[option, "folder"]);
    }
    // An existing file stays if nothing fits.
    let old = folder.write("old.html", "old");
    run(&format!("plan {} --budget 1KiB --report {old}", mlp())).expect(3);
    assert_eq!(std::fs::read_to_string(&old).unwrap(), "old");
}

/// Runs the page's script in a browser, if there is one.
#[test]
fn a_browser_draws_the_page() {
    let Some(browser) = ["chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find(|name| {
            Command::new(name)
                .arg("--version")
                .output()
                .is_ok_and(|out| out.status.success())
        })
    else {
        // Not `eprintln!`: the test harness would capture it.
        let _ = writeln!(
            std::io::stderr(),
            "skipped: no chromium here; the page's script was not run"
        );
        return;
    };
    let folder = Folder::new("browser");
    let file = folder.file("plan.html");
    run(&format!(
        "plan {} --optimizer adamw --budget 40% --report {file}",
        model(GPT2)
    ))
    .expect(0);
    let out = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--window-size=1200,900",
            "--virtual-time-budget=20000",
        ])
        .arg(format!("--user-data-dir={}", folder.file("profile")))
        .args(["--dump-dom", &format!("file://{file}")])
        .output()
        .unwrap();
    let drawn = String::from_utf8(out.stdout).unwrap();
    // The script sets this when everything has been drawn.
    assert!(
        drawn.contains("data-drawn=\"yes\""),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    let page = std::fs::read_to_string(&file).unwrap();
    let decisions = data(&page)["decisions"].as_array().unwrap().len();
    assert!(
        drawn.contains(&format!("{decisions} of {decisions}, ")),
        "the table of decisions should be filled"
    );
    assert!(drawn.contains("class=\"group") && drawn.contains("class=\"key k1\""));
}

/// The JSON in a page.
fn data(page: &str) -> Json {
    let start = "<script id=\"data\" type=\"application/json\">";
    let from = page.find(start).unwrap() + start.len();
    let to = from + page[from..].find("</script>").unwrap();
    serde_json::from_str(&page[from..to]).unwrap()
}

/// The names of all tags, in order, of a text whose tags are balanced and whose attributes are
/// quoted.
#[track_caller]
fn balanced(text: &str) -> Vec<String> {
    let mut tags = vec![];
    let mut open: Vec<String> = vec![];
    let mut rest = text;
    while let Some(at) = rest.find('<') {
        assert!(!rest[..at].contains('>'), "a stray > in {:?}", &rest[..at]);
        rest = &rest[at + 1..];
        let mut quoted = false;
        let end = rest
            .find(|c: char| {
                quoted ^= c == '"';
                c == '>' && !quoted
            })
            .expect("a tag should end");
        let tag = &rest[..end];
        rest = &rest[end + 1..];
        if tag.starts_with('!') {
            continue;
        }
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "after {tags:?}");
            continue;
        }
        let name = tag.split([' ', '/']).next().unwrap().to_string();
        assert!(
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric()),
            "{tag:?}"
        );
        assert!(
            tag.matches('"').count().is_multiple_of(2) && !tag.contains('<'),
            "{tag:?}"
        );
        tags.push(name.clone());
        if tag.ends_with('/') {
            continue;
        }
        // Their content is not markup.
        if name == "script" || name == "style" {
            let end = rest.find(&format!("</{name}>")).expect("it should end");
            assert!(
                !rest[..end].contains("</"),
                "{name} should not hold an end of anything"
            );
            rest = &rest[end..];
        }
        open.push(name);
    }
    assert!(open.is_empty(), "{open:?} should be closed");
    tags
}
