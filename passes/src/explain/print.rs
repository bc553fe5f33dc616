//! Explanations as text.

use super::Class;
use super::chunk::ChunkExplanation;
use super::data::{Choice, Event, Explanation, GapChoice, Hosted, Outcome, Stay, Way};
use crate::plan::tuning::AHEAD_WORTH;
use ir::Instr;
use std::fmt::{Arguments, Write};

impl Explanation {
    /// The text for people. `bytes` and `micros` say how numbers are written.
    pub fn print(&self, bytes: &dyn Fn(u64) -> String, micros: &dyn Fn(f64) -> String) -> String {
        let mut page = Page::new(bytes, micros, self.micros);
        page.value(self);
        page.line(format_args!("\nlines that touch it"));
        page.events(&self.events);
        if let Some(home) = &self.home {
            page.home(home, self);
        }
        for gap in &self.gaps {
            page.gap(gap, self);
        }
        if self.home.is_none() && self.gaps.is_empty() {
            page.line(format_args!(
                "\nnothing was to be decided: no line lies between two of its accesses"
            ));
        }
        page.text
    }
}

impl ChunkExplanation {
    /// The text for people. `bytes` and `micros` say how numbers are written.
    pub fn print(&self, bytes: &dyn Fn(u64) -> String, micros: &dyn Fn(f64) -> String) -> String {
        let mut page = Page::new(bytes, micros, self.micros);
        page.line(format_args!(
            "{} : {}, a chunk: {} states that live on the {} and are copied together",
            self.name,
            bytes(self.bytes),
            self.states,
            self.pool
        ));
        page.stays(&self.stays);
        page.line(format_args!("\nlines that copy it to the device"));
        page.events(&self.copies);
        page.line(format_args!(""));
        page.outcome("on the device", &self.at_home);
        if self.updated_there {
            page.updated();
        }
        page.text
    }
}

/// The smallest change of a time that does not round to nothing, µs.
const SHOWN: f64 = 0.05;

/// The text so far, and how numbers are written in it.
struct Page<'a> {
    text: String,
    bytes: &'a dyn Fn(u64) -> String,
    micros: &'a dyn Fn(f64) -> String,
    /// Time of the step as planned, µs.
    planned: f64,
}

impl<'a> Page<'a> {
    fn new(
        bytes: &'a dyn Fn(u64) -> String,
        micros: &'a dyn Fn(f64) -> String,
        planned: f64,
    ) -> Page<'a> {
        Page {
            text: String::new(),
            bytes,
            micros,
            planned,
        }
    }

    fn line(&mut self, line: Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "{line}");
    }

    /// What a value is, and where it lies.
    fn value(&mut self, value: &Explanation) {
        if let [asked, sharing @ ..] = &value.shares[..]
            && !sharing.is_empty()
        {
            let sharing: Vec<String> = sharing.iter().map(|name| format!("%{name}")).collect();
            let sharing = sharing.join(", which shares those of ");
            self.line(format_args!(
                "%{asked} is a reshape: it shares the bytes of {sharing}\n"
            ));
        }
        let size = (self.bytes)(value.ty.bytes());
        let (name, ty, class) = (&value.name, &value.ty, value.class.name());
        self.line(format_args!("%{name} : {ty}, {size}, {class}"));
        if !value.module.is_empty() && value.class != Class::Input {
            self.line(format_args!("  module    {}", value.module));
        }
        self.line(format_args!("  defined   {}", value.defined));
        self.stays(&value.stays);
        let at = match value.at_peak {
            true => "on the device",
            false => "not on the device",
        };
        self.line(format_args!(
            "  peak      {at} at the peak, at {}",
            value.peak_line
        ));
    }

    fn stays(&mut self, stays: &[Stay]) {
        for stay in stays {
            let from = line_name(stay.from, "the start");
            let to = line_name(stay.to, "the end");
            let (buffer, pool, address) = (&stay.buffer, &stay.pool, stay.address);
            self.line(format_args!(
                "  lies      {buffer}@{pool}+{address} from {from} to {to}"
            ));
        }
    }

    fn events(&mut self, events: &[Event]) {
        for event in events {
            let (start, end) = ((self.micros)(event.start), (self.micros)(event.end));
            self.line(format_args!("  {:<72} ; {start} .. {end}", event.text));
        }
        if events.is_empty() {
            self.line(format_args!("  none"));
        }
    }

    /// Where a state lives, and what else would cost.
    fn home(&mut self, home: &Choice, of: &Explanation) {
        self.line(format_args!(
            "\nas a state it {}",
            lives(of.hosted.as_ref())
        ));
        let chunk = of.hosted.as_ref().and_then(|hosted| hosted.chunk.as_ref());
        if let Some(chunk) = chunk {
            let (name, states) = (&chunk.name, chunk.states);
            let (size, time) = ((self.bytes)(chunk.bytes), (self.micros)(chunk.micros));
            self.line(format_args!(
                "  chunk     it comes in chunk {name}, with {size} of {states} states in one copy \
                 of {time}, and stays with it; `explain {name}` says what the chunk costs"
            ));
        }
        let pool = of.hosted.as_ref().map_or(&of.beyond, |hosted| &hosted.pool);
        let word = |way| match way {
            Way::Keep => "on the device".to_string(),
            Way::Swap | Way::Recompute => format!("on the {pool}"),
        };
        self.choice(home, &of.planner, ("copying it", &word));
        if of
            .hosted
            .as_ref()
            .is_some_and(|hosted| hosted.updated_there)
        {
            self.updated();
        }
    }

    /// What is done with a value over a gap, and what else would cost.
    fn gap(&mut self, gap: &GapChoice, of: &Explanation) {
        let from = line_name(gap.from, "the start");
        let to = line_name(gap.to, "the end");
        let (idle, done) = ((self.micros)(gap.micros), gap.choice.way.done());
        self.line(format_args!(
            "\nfrom {from} to {to}, for {idle}, it is {done}"
        ));
        let word = |way: Way| way.name().to_string();
        self.choice(&gap.choice, &of.planner, ("a swap", &word));
    }

    /// Why a choice was made, and what its other ways would cost. `words` names a copy to the host
    /// and back, and each way.
    fn choice(
        &mut self,
        choice: &Choice,
        planner: &str,
        (copy, word): (&str, &dyn Fn(Way) -> String),
    ) {
        match &choice.reason {
            Some(reason) => {
                // A planner prices only the means that it weighs.
                let prices = [(copy, reason.swap), ("a recompute", reason.recompute)];
                let prices: String = prices
                    .iter()
                    .filter_map(|(means, price)| Some((means, (self.micros)((*price)?))))
                    .map(|(means, price)| format!("; {means} was estimated at {price}"))
                    .collect();
                let freed = (self.bytes)(reason.bytes);
                self.line(format_args!(
                    "  because   planner {planner}: this frees {freed}{prices}"
                ));
            }
            None => self.line(format_args!(
                "  because   planner {planner} did not need its bytes, or found cheaper ones"
            )),
        }
        for (way, outcome) in &choice.others {
            self.outcome(&word(*way), outcome);
        }
    }

    /// What a step comes to with another decision.
    fn outcome(&mut self, word: &str, outcome: &Result<Outcome, String>) {
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(why) => return self.line(format_args!("  {word:<9} instead: {why}")),
        };
        let peak = (self.bytes)(outcome.peak);
        if !outcome.fits {
            // The time of the smallest variant would be compared with that of a faster one.
            return self.line(format_args!(
                "  {word:<9} instead: does not fit: peak {peak} or more"
            ));
        }
        let change = outcome.micros - self.planned;
        let sign = if change <= -SHOWN { "-" } else { "+" };
        let better = match change < -AHEAD_WORTH * self.planned {
            true => ": faster than the plan",
            false => "",
        };
        let (step, change) = ((self.micros)(outcome.micros), (self.micros)(change.abs()));
        self.line(format_args!(
            "  {word:<9} instead: step {step} ({sign}{change}), peak {peak}{better}"
        ));
    }

    /// What keeping on the device means for states that the host updates.
    fn updated(&mut self) {
        self.line(format_args!(
            "  update    with this choice too, the host computes it, and copies the new value to \
             the device in each step"
        ));
    }
}

/// Where a state lives, in words.
fn lives(hosted: Option<&Hosted>) -> String {
    let Some(hosted) = hosted else {
        return "lives on the device".into();
    };
    let then = match (hosted.comes, hosted.updated_there) {
        (true, true) => ", comes for its uses, and is updated on the host",
        (true, false) => ", and comes for its uses",
        (false, true) => " and is updated on the host; it never comes to the device",
        (false, false) => "; no line of the device reads it",
    };
    format!("lives on the {}{then}", hosted.pool)
}

/// A line's name, or a word where there is no line.
fn line_name(instr: Option<Instr>, none: &str) -> String {
    instr.map_or(none.into(), |instr| format!("{instr:?}"))
}
