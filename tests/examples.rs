//! The examples run and end well.

#[path = "../examples/attention.rs"]
mod attention;
#[path = "../examples/own_encoder.rs"]
mod own_encoder;
#[path = "../examples/paged_decode.rs"]
mod paged_decode;

#[test]
fn attention_on_host_slices() {
    attention::main().unwrap();
}

#[test]
fn attention_in_an_applications_encoder() {
    own_encoder::main().unwrap();
}

#[test]
fn decoding_over_pages() {
    paged_decode::main().unwrap();
}
