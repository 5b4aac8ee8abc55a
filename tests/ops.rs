//! Every operation, every variant an adapter can run, against the f64 oracle, on every adapter there is.

mod common;

use common::*;
use wgpu_attention::*;

fn uniform(batch: u32, len: u32) -> Lengths<'static> {
    Lengths::Uniform { batch, len }
}

#[test]
fn smoke() {
    for (name, runtime) in runtimes() {
        println!(
            "{name}: {:?} {:?} nan {} loops {:?}",
            runtime.caps().subgroup,
            runtime.caps().subgroup_seen,
            runtime.caps().keeps_nan,
            runtime.caps().loop_limit
        );
        println!("{}", String::from_utf8_lossy(&runtime.verdicts()));
        let mut data = Data::new(1);
        let desc = AttentionDesc { heads: 4, kv_heads: 2, head_dim: 64, causal: true, lse: true, ..Default::default() };
        let batch = Batch::new(&desc, uniform(2, 100), uniform(2, 130));
        let tensors = Tensors::random(&desc, &batch, &mut data);
        let expected = Expected::of(&desc, &batch, &tensors.input());
        let attention = Attention::new(runtime, &desc).unwrap();
        println!("{:?}", attention.variants());
        let got = block(attention.run(&batch, &tensors.input())).unwrap();
        expected.check(&got, true, name);
    }
}
