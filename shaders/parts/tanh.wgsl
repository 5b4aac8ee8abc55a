// tanh to about 1 ulp, where WGSL's own may be a table of 11 bits or overflow to NaN.
// |x| < 0.625: an odd polynomial (Cephes tanhf); beyond: 1 − 2 / (e^{2|x|} + 1), which is 1 from 10 on.
fn tanh4(x: vec4<f32>) -> vec4<f32> {
    let a = abs(x);
    let z = x * x;
    let small = x + x * z * ((((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z - 3.33332819422e-1);
    let e = exp2(select(a, vec4<f32>(10.0), a > vec4<f32>(10.0)) * 2.8853900817779268);
    let large = sign(x) * (1.0 - 2.0 / (e + 1.0));
    return select(large, small, a < vec4<f32>(0.625));
}
