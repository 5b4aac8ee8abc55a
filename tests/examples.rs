//! The examples run and end well.

#[path = "../examples/attention.rs"]
mod attention;
#[path = "../examples/own_encoder.rs"]
mod own_encoder;

#[test]
fn attention_on_host_slices() {
    attention::main().unwrap();
}

#[test]
fn attention_in_an_applications_encoder() {
    own_encoder::main().unwrap();
}
