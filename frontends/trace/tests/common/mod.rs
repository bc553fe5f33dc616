//! Shared code of the readers' tests: pickles, made by hand.

/// A value to pickle.
#[derive(Clone)]
pub(crate) enum Py {
    /// A whole number.
    Int(i64),
    /// A whole number of any size, as bytes.
    Long(Vec<u8>),
    /// Text.
    Str(String),
    /// A list.
    List(Vec<Py>),
    /// A dict.
    Dict(Vec<(&'static str, Py)>),
    /// Raw opcodes.
    Raw(Vec<u8>),
}

/// Text.
pub(crate) fn text(text: &str) -> Py {
    Py::Str(text.into())
}

/// A pickle of protocol 4.
pub(crate) fn pickle(value: &Py) -> Vec<u8> {
    let mut out = vec![0x80, 4];
    put(value, &mut out);
    out.push(b'.');
    out
}

fn put(value: &Py, out: &mut Vec<u8>) {
    match value {
        Py::Int(number) => put(&Py::Long(number.to_le_bytes().into()), out),
        Py::Long(bytes) => {
            out.extend([0x8a, bytes.len() as u8]);
            out.extend(bytes);
        }
        Py::Str(text) => {
            out.push(b'X');
            out.extend((text.len() as u32).to_le_bytes());
            out.extend(text.as_bytes());
        }
        Py::List(items) => {
            out.extend(*b"](");
            items.iter().for_each(|item| put(item, out));
            out.push(b'e');
        }
        Py::Dict(entries) => {
            out.extend(*b"}(");
            for (key, value) in entries {
                put(&text(key), out);
                put(value, out);
            }
            out.push(b'u');
        }
        Py::Raw(opcodes) => out.extend(opcodes),
    }
}

/// An event of a snapshot.
pub(crate) fn event(action: &str, address: i64, bytes: i64) -> Py {
    Py::Dict(vec![
        ("action", text(action)),
        ("addr", Py::Int(address)),
        ("size", Py::Int(bytes)),
        ("stream", Py::Int(0)),
    ])
}

/// A segment of a snapshot: address, size, and its used blocks.
pub(crate) fn segment(device: i64, address: i64, bytes: i64, used: &[(i64, i64)]) -> Py {
    let block = |&(at, size): &(i64, i64)| {
        Py::Dict(vec![
            ("address", Py::Int(at)),
            ("size", Py::Int(size)),
            ("state", text("active_allocated")),
        ])
    };
    Py::Dict(vec![
        ("device", Py::Int(device)),
        ("address", Py::Int(address)),
        ("total_size", Py::Int(bytes)),
        ("stream", Py::Int(0)),
        ("segment_type", text("large")),
        ("blocks", Py::List(used.iter().map(block).collect())),
    ])
}

/// A snapshot with a list of events for each device.
pub(crate) fn snapshot(segments: Vec<Py>, devices: Vec<Vec<Py>>) -> Vec<u8> {
    let traces = devices.into_iter().map(Py::List).collect();
    pickle(&Py::Dict(vec![
        ("segments", Py::List(segments)),
        ("device_traces", Py::List(traces)),
    ]))
}
