//! `lighterage offload`, from a file to a report.

use crate::common::{Folder, run};

const INSTANCE: &str = r#"{
  "link_bytes_per_second": 2097152000,
  "memory_bytes": 9437184000,
  "layers": [
    {"weight_bytes": 630140928, "activation_bytes": 25165824,
     "forward_micros": 0, "backward_micros": 0},
    {"weight_bytes": 453144576, "activation_bytes": 25165824,
     "forward_micros": 40236, "backward_micros": 120708, "count": 36}
  ]
}"#;

#[test]
fn an_instance_is_solved_by_every_algorithm() {
    let folder = Folder::new("offload-solve");
    let file = folder.write("gpt2.json", INSTANCE);
    let bound = run(&format!("offload solve {file} --algorithm bound --json"))
        .expect(0)
        .json()[0]["bound_micros"]
        .as_f64();
    let algorithms = [
        "greedy+",
        "greedy",
        "greedy*",
        "l2l",
        "first-half",
        "autoswap-doa",
        "autoswap-aoa",
        "autoswap-wdoa",
        "autoswap-swdoa",
    ];
    for algorithm in algorithms {
        let json = run(&format!(
            "offload solve {file} --algorithm {algorithm} --json"
        ))
        .expect(0)
        .json();
        let number = |name: &str| json[0][name].as_f64().unwrap();
        assert_eq!(json[0]["algorithm"], algorithm);
        assert!((number("bound_micros") - bound.unwrap()).abs() <= 1e-6 * bound.unwrap());
        assert!(number("bound_micros") <= number("step_micros"));
        assert!(number("peak_bytes") <= number("memory_bytes"));
        assert_eq!(json[0]["layers"].as_array().unwrap().len(), 37);
        assert_eq!(json[0]["operations"].as_array().unwrap().len(), 74);
        if algorithm == "greedy+" {
            assert!(number("gap_percent") < 1.0);
        }
    }
    let text = run(&format!("offload solve {file}")).expect(0).out;
    for words in ["37 layers, greedy+: checked", "lower bound", "layer 36"] {
        assert!(text.contains(words), "{words:?} should be in:\n{text}");
    }
}

#[test]
fn with_memory_enough_nothing_moves() {
    let folder = Folder::new("offload-keep");
    let file = folder.write("gpt2.json", INSTANCE);
    let json = run(&format!("offload solve {file} --memory 20GiB --json"))
        .expect(0)
        .json();
    assert_eq!(json[0]["overhead_percent"], 0.0);
    assert_eq!(json[0]["to_device_bytes"], 0);
}

#[test]
fn the_report_counts_the_transfers_of_each_direction() {
    let folder = Folder::new("offload-count");
    let file = folder.write("gpt2.json", INSTANCE);
    let json = &run(&format!("offload solve {file} --json"))
        .expect(0)
        .json()[0];
    let out = run(&format!("offload solve {file}")).expect(0).out;
    for (line, way) in [("to the host", "to host"), ("and back", "to device")] {
        let transfers = json["transfers"].as_array().unwrap().iter();
        let count = transfers.filter(|transfer| transfer["way"] == way).count();
        let found = out.lines().find(|text| text.contains(line)).unwrap();
        assert!(found.ends_with(&format!("in {count} transfers")), "{out}");
    }
}

#[test]
fn operations_without_time_are_no_infinite_percentage() {
    let folder = Folder::new("offload-no-time");
    let layer = r#"{"weight_bytes": 20000, "activation_bytes": 1000, "forward_micros": 0,
        "backward_micros": 0, "count": 6}"#;
    let text = format!(
        r#"{{"link_bytes_per_second": 1000, "memory_bytes": 100000, "layers": [{layer}]}}"#
    );
    let file = folder.write("none.json", text);
    let out = run(&format!("offload solve {file}")).expect(0).out;
    assert!(out.contains("far over its operations"), "{out}");
}

#[test]
fn what_is_wrong_is_said() {
    let folder = Folder::new("offload-errors");
    let file = folder.write("gpt2.json", INSTANCE);
    run(&format!("offload solve {file} --memory 1GiB"))
        .expect(3)
        .says(&["layer 36", "--memory 1837424640"]);
    let object = &run(&format!("offload solve {file} --memory 1GiB --json"))
        .expect(3)
        .json()[0];
    assert_eq!(object["smallest_feasible_bytes"], 1_837_424_640);
    run(&format!("offload solve {file} --algorithm best"))
        .expect(2)
        .says(&["greedy+"]);
    run("offload solve /nowhere.json")
        .expect(2)
        .says(&["/nowhere.json"]);
    let layer =
        r#"{"weight_bytes": 1, "activation_bytes": 1, "forward_micros": 1, "backward_micros": 1}"#;
    for (layers, link, words) in [
        ("", "1", "there are no layers"),
        (layer, "0", "bandwidth"),
        (layer, "-1", "bandwidth"),
        (layer, "1e-300", "1e-300 bytes per second"),
        (layer, "1e300", "from 1e3 to 1e18"),
        (
            &layer.replace("\"forward_micros\": 1", "\"forward_micros\": 1e300"),
            "1",
            "time of its forward is 1e300 us",
        ),
        (
            &layer.replace("\"weight_bytes\": 1", "\"weight_bytes\": -1"),
            "1",
            "-1",
        ),
        (
            &layer.replace("\"forward_micros\": 1", "\"forward_micros\": -1"),
            "1",
            "time of its forward",
        ),
        (
            &layer.replace("weight_bytes", "weights"),
            "1",
            "unknown field `weights`",
        ),
        (
            &layer.replace('}', ", \"count\": 100000}"),
            "1",
            "100000 layers",
        ),
    ] {
        let text = format!(
            r#"{{"link_bytes_per_second": {link}, "memory_bytes": 100, "layers": [{layers}]}}"#
        );
        let file = folder.write("bad.json", text);
        run(&format!("offload solve {file}"))
            .expect(2)
            .says(&["bad.json", words]);
    }
}

#[test]
fn the_papers_table_and_figure_are_printed() {
    let rows = run("offload table1 --json").expect(0).json().remove(0);
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 15);
    for row in rows {
        let number = |name: &str| {
            row[name]
                .as_f64()
                .unwrap_or_else(|| panic!("{name}: {row}"))
        };
        assert!((number("l2l") - number("their l2l")).abs() <= 1.0, "{row}");
        assert_eq!(number("bound"), number("sum of u"), "{row}");
        assert!(number("greedy") <= number("greedy*"), "{row}");
    }
    let text = run("offload figure4").expect(0).out;
    assert_eq!(text.lines().count(), 2 + 24, "{text}");
    run("offload table1 --blocks 2000")
        .expect(2)
        .says(&["1000"]);
}
