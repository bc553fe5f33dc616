//! The language: its text, its rules, its documentation.

mod docs;
mod text;
mod verify;
