//! Each rule against central differences in f64. A case declares parameters and inputs, then nodes
//! that compute `%y`. The loss is the sum of `%y` times fixed numbers.
//!
//! A declaration is a name and a type. `+`: its numbers are positive. `=`: its numbers follow.
//! Other floating-point numbers are drawn from -1..1, apart from 0. `stat` is the type of
//! statistics: f64, or f32 for half precision.

use ir::graph::Output;
use ir::op::attrs::Reduction;
use ir::op::{OpKind, parse_type};
use ir::{Graph, Op, Phase, TensorType, Value, text};
use lighterage_tests::evaluate::{self, Tensors};
use lighterage_tests::numbers::{Random, shape_of};
use passes::graph::autodiff::{self, Derivative, derivative};
use passes::graph::optimizer::{self, Optimizer};
use runtime::kernels::owned::OwnedTensor;
use std::collections::{BTreeMap, BTreeSet};

/// Functions that have a derivative at the drawn numbers.
const SMOOTH: &[&str] = &[
    // Of single elements.
    "param a f64[2,3] ; %y = neg %a : f64[2,3]",
    "param a f64[2,3] ; %y = abs %a : f64[2,3]",
    "param a f64[2,3] ; %y = exp %a : f64[2,3]",
    "param a f64[2,3]+ ; %y = log %a : f64[2,3]",
    "param a f64[2,3]+ ; %y = sqrt %a : f64[2,3]",
    "param a f64[2,3]+ ; %y = rsqrt %a : f64[2,3]",
    "param a f64[2,3] ; %y = reciprocal %a : f64[2,3]",
    "param a f64[2,3] ; %y = tanh %a : f64[2,3]",
    "param a f64[2,3] ; %y = sigmoid %a : f64[2,3]",
    "param a f64[2,3] ; %y = sin %a : f64[2,3]",
    "param a f64[2,3] ; %y = cos %a : f64[2,3]",
    "param a f64[2,3] ; %y = atan %a : f64[2,3]",
    "param a f64[2,3] ; %y = erf %a : f64[2,3]",
    "param a f64[2,3] ; %y = relu %a : f64[2,3]",
    "param a f64[2,3] ; %y = silu %a : f64[2,3]",
    "param a f64[2,3] ; %y = gelu %a tanh=false : f64[2,3]",
    "param a f64[2,3] ; %y = gelu %a tanh=true : f64[2,3]",
    "param a f64[2,3] ; %y = clamp %a max=0.5 min=-0.5 : f64[2,3]",
    "param a f64[2,3] ; %y = clamp %a max=inf min=-0.5 : f64[2,3]",
    "param a f64[2,3] ; %y = clamp %a max=0.5 min=-inf : f64[2,3]",
    "param a f64[2,3] ; %y = clamp %a max=inf min=-inf : f64[2,3]",
    "param a f64[2,3] ; %b = cast %a dtype=f64 : f64[2,3] ; %y = exp %b : f64[2,3]",
    // Of an element and a number.
    "param a f64[2,3] ; %y = add_scalar %a value=2.0 : f64[2,3]",
    "param a f64[2,3] ; %y = mul_scalar %a value=-3.0 : f64[2,3]",
    "param a f64[2,3] ; %y = div_scalar %a value=4.0 : f64[2,3]",
    "param a f64[2,3] ; %y = rsub_scalar %a value=1.5 : f64[2,3]",
    "param a f64[2,3] ; %y = pow_scalar %a value=2.0 : f64[2,3]",
    "param a f64[2,3] ; %y = pow_scalar %a value=3 : f64[2,3]",
    "param a f64[2,3]+ ; %y = pow_scalar %a value=-0.5 : f64[2,3]",
    "param a f64[2,3] ; %y = pow_scalar %a value=1.0 : f64[2,3]",
    // Of two elements, broadcast in either operand.
    "param a f64[2,3] ; param b f64[2,3] ; %y = add %a, %b : f64[2,3]",
    "param a f64[2,3] ; param b f64[3] ; %y = add %a, %b : f64[2,3]",
    "param a f64[] ; param b f64[2,1] ; %y = sub %a, %b : f64[2,1]",
    "param a f64[2,1] ; param b f64[1,3] ; %y = sub %a, %b : f64[2,3]",
    "param a f64[2,1,2] ; param b f64[3,1] ; %y = mul %a, %b : f64[2,3,2]",
    "param a f64[2,3] ; %y = mul %a, %a : f64[2,3]",
    "param a f64[2,3] ; param b f64[3]+ ; %y = div %a, %b : f64[2,3]",
    "param a f64[3] ; param b f64[2,1] ; %y = div %a, %b : f64[2,3]",
    "param a f64[2,3]+ ; param b f64[3] ; %y = pow %a, %b : f64[2,3]",
    "param a f64[2,3] ; param b f64[3] ; %y = maximum %a, %b : f64[2,3]",
    "param a f64[3] ; param b f64[2,3] ; %y = minimum %a, %b : f64[2,3]",
    "input m bool[2,3]=1,0,0,1,0,1 ; param a f64[3] ; param b f64[2,1] ;
     %y = where %m, %a, %b : f64[2,3]",
    "input m bool[]=1 ; param a f64[] ; param b f64[2] ; %y = where %m, %a, %b : f64[2]",
    // Reductions.
    "param a f64[2,3,2] ; %y = sum %a dims=[0,2] keepdim=false : f64[3]",
    "param a f64[2,3,2] ; %y = sum %a dims=[1] keepdim=true : f64[2,1,2]",
    "param a f64[] ; %y = sum %a dims=[] keepdim=false : f64[]",
    "param a f64[2,3,2] ; %y = mean %a dims=[0,2] keepdim=false : f64[3]",
    "param a f64[2,3] ; %y = mean %a dims=[0,1] keepdim=true : f64[1,1]",
    "param a f64[2,3] ; %y = amax %a dims=[1] keepdim=false : f64[2]",
    "param a f64[] ; %y = amax %a dims=[] keepdim=false : f64[]",
    "param a f64[2,3] ; %y = amin %a dims=[0,1] keepdim=true : f64[1,1]",
    "param a f64[2,3] ; %y = cumsum %a dim=1 : f64[2,3]",
    "param a f64[2,3] ; %y = cumsum %a dim=0 : f64[2,3]",
    "param a f64[2,4] ; %y, %i = topk %a dim=1 k=2 largest=true : f64[2,2], i64[2,2]",
    "param a f64[4,2] ; %y, %i = topk %a dim=0 k=3 largest=false : f64[3,2], i64[3,2]",
    "param a f64[2,3] ; %y = softmax %a dim=1 : f64[2,3]",
    "param a f64[2,3] ; %y = softmax %a dim=0 : f64[2,3]",
    "param a f64[2,3] ; %y = log_softmax %a dim=1 : f64[2,3]",
    // Norms.
    "param a f64[2,3,2] ; %y, %m, %r = layer_norm %a dims=2 eps=1e-5 : f64[2,3,2], stat[2,1,1],
     stat[2,1,1]",
    "param a f64[2,4] ; param w f64[4] ; %y, %m, %r = layer_norm %a, %w dims=1 eps=1e-5 : f64[2,4],
     stat[2,1], stat[2,1]",
    "param a f64[2,4] ; param w f64[4] ; param b f64[4] ; %y, %m, %r = layer_norm %a, %w, %b dims=1
     eps=1e-5 : f64[2,4], stat[2,1], stat[2,1]",
    "input a f64[2,4] ; param w f64[4] ; param b f64[4] ; %y, %m, %r = layer_norm %a, %w, %b dims=1
     eps=1e-5 : f64[2,4], stat[2,1], stat[2,1]",
    "param a f64[3,2,2] ; param w f64[2] ; param b f64[2] ; %y, %m, %r, %v = batch_norm %a, %w, %b
     eps=1e-5 : f64[3,2,2], f64[2], f64[2], f64[2]",
    "param a f64[4,2] ; input w f64[2] ; input b f64[2] ; %y, %m, %r, %v = batch_norm %a, %w, %b
     eps=1e-5 : f64[4,2], f64[2], f64[2], f64[2]",
    // Products.
    "param a f64[2,3] ; param b f64[3,4] ; %y = matmul %a, %b ta=false tb=false : f64[2,4]",
    "param a f64[3,2] ; param b f64[3,4] ; %y = matmul %a, %b ta=true tb=false : f64[2,4]",
    "param a f64[2,3] ; param b f64[4,3] ; %y = matmul %a, %b ta=false tb=true : f64[2,4]",
    "param a f64[3,2] ; param b f64[4,3] ; %y = matmul %a, %b ta=true tb=true : f64[2,4]",
    "param a f64[2,3,2] ; param b f64[2,4,3] ; %y = matmul %a, %b ta=true tb=true : f64[2,2,4]",
    "param a f64[0,3] ; param b f64[3,4] ; %y = matmul %a, %b ta=false tb=false : f64[0,4]",
    "param a f64[5,2] ; param w f64[3,2,4] ; input e i64[3]=1,1,4 ;
     %y = grouped_matmul %a, %w, %e tb=false : f64[5,4]",
    "param a f64[5,2] ; param w f64[3,4,2] ; input e i32[3]=2,0,5 ;
     %y = grouped_matmul %a, %w, %e tb=true : f64[5,4]",
    "param a f64[5,2] ; param b f64[5,3] ; input e i64[3]=1,1,4 ;
     %y = grouped_outer %a, %b, %e : f64[3,2,3]",
    "param c f64[4] ; param a f64[2,3] ; param b f64[4,3] ; %y = addmm %c, %a, %b ta=false tb=true :
     f64[2,4]",
    "param c f64[2,1] ; param a f64[3,2] ; input b f64[3,4] ; %y = addmm %c, %a, %b ta=true tb=false
     : f64[2,4]",
    // Windows.
    "param x f64[2,4,5] ; param w f64[4,2,3] ; param b f64[4] ; %y = convolution %x, %w, %b
     dilation=[1] groups=2 padding=[1] stride=[2] : f64[2,4,3]",
    "param x f64[1,2,5,4] ; param w f64[3,2,2,3] ; %y = convolution %x, %w dilation=[2,1] groups=1
     padding=[0,1] stride=[1,2] : f64[1,3,3,2]",
    "input x f64[1,2,4,4] ; param w f64[2,2,3,3] ; param b f64[2] ; %y = convolution %x, %w, %b
     dilation=[1,1] groups=1 padding=[0,0] stride=[1,1] : f64[1,2,2,2]",
    "param x f64[1,4,3] ; input s f64[1,2,6] ; param w f64[4,1,3] ; %y = convolution_bwd %x, %s, %w
     dilation=[1] groups=2 mask=[1,0,0] padding=[1] stride=[2] : f64[1,2,6]",
    "param x f64[1,3,3,2] ; input s f64[1,2,5,4] ; param w f64[3,2,2,3] ; %y = convolution_bwd %x,
     %s, %w dilation=[2,1] groups=1 mask=[1,0,0] padding=[0,1] stride=[1,2] : f64[1,2,5,4]",
    "param a f64[1,2,4,4] ; %y, %i = max_pool2d %a ceil=false dilation=[1,1] kernel=[3,3]
     padding=[1,1] stride=[1,2] : f64[1,2,4,2], i64[1,2,4,2]",
    // Attention: causal, grouped queries, masks.
    "param q f64[1,2,3,4] ; param k f64[1,2,3,4] ; param v f64[1,2,3,2] ; %y, %l = sdpa %q, %k, %v
     causal=true scale=0.5 : f64[1,2,3,2], f32[1,2,3]",
    "param q f64[1,4,2,3] ; param k f64[1,2,3,3] ; param v f64[1,2,3,3] ; param m f64[1,1,2,3] ;
     %y, %l = sdpa %q, %k, %v, %m causal=false scale=0.5 : f64[1,4,2,3], f32[1,4,2]",
    "input q f64[2,2,3,3] ; input k f64[2,2,3,3] ; input v f64[2,2,3,3] ; param m f64[3,3] ;
     %y, %l = sdpa %q, %k, %v, %m causal=true scale=0.5 : f64[2,2,3,3], f32[2,2,3]",
    "param q f64[1,1,2,3] ; input k f64[1,1,3,3] ; param v f64[1,1,3,3] ;
     input m bool[2,3]=1,0,1,1,1,0 ; %y, %l = sdpa %q, %k, %v, %m causal=false scale=1.0 :
     f64[1,1,2,3], f32[1,1,2]",
    "param q f64[1,4,2,3] ; param k f64[1,2,3,3] ; param v f64[1,2,3,3] ; param m f64[1,1,2,3] ;
     input r i64[2]=7,3 ; %d = dropout_key %r p=0.5 stream=2 : i64[4] ;
     %y, %l = sdpa %q, %k, %v, %m, %d causal=false scale=0.5 : f64[1,4,2,3], f32[1,4,2]",
    "param x f64[1,3,6,2] ; input r i64[2]=7,3 ; %d = dropout_key %r p=0.25 stream=2 : i64[4] ;
     %y, %l = sdpa_rows %x, %x, %x, %d causal=true first=[0,2,4] heads=[2,2] scale=0.5 :
     f64[1,3,2,2], f32[1,2,3]",
    "param x f64[1,3,6,2] ; %y, %l = sdpa_rows %x, %x, %x causal=true first=[0,2,4] heads=[2,2]
     scale=0.5 : f64[1,3,2,2], f32[1,2,3]",
    "param x f64[1,3,7,2] ; param k f64[1,1,3,2] ; %y, %l = sdpa_rows %x, %k, %x causal=false
     first=[1,-1,6] heads=[2,1] scale=0.5 : f64[1,3,2,2], f32[1,2,3]",
    "param x f64[1,3,6,2] ; param z f64[1,3,6,2] ; %y, %l = sdpa_rows %x, %z, %x causal=false
     first=[0,2,4] heads=[2,2] scale=0.5 : f64[1,3,2,2], f32[1,2,3]",
    // Rows in which nothing takes part are 0, with no adjoint.
    "param a f64[2,3] ; input m f64[2,3]=0,0,-inf,-inf,-inf,-inf ; %b = add %a, %m : f64[2,3] ;
     %p = softmax %b dim=1 : f64[2,3] ; %n = ne %p, %p : bool[2,3] ;
     %z = full dtype=f64 shape=[] value=0.0 : f64[] ; %y = where %n, %z, %p : f64[2,3]",
    "param a f64[3,2] ; input m f64[3,2]=0,-inf,0,-inf,-inf,-inf ; %b = add %a, %m : f64[3,2] ;
     %p = softmax %b dim=0 : f64[3,2] ; %o = ne_scalar %b value=-inf : bool[3,2] ;
     %l = any %o dims=[0] keepdim=true : bool[1,2] ;
     %z = full dtype=f64 shape=[3,2] value=0.0 : f64[3,2] ; %y = where %l, %p, %z : f64[3,2]",
    "param q f64[1,1,2,3] ; param k f64[1,1,3,3] ; param v f64[1,1,3,3] ;
     input m bool[2,3]=0,0,0,1,1,0 ; %y, %l = sdpa %q, %k, %v, %m causal=false scale=1.0 :
     f64[1,1,2,3], f32[1,1,2]",
    "param q f64[1,1,2,3] ; param k f64[1,1,3,3] ; param v f64[1,1,3,3] ;
     param m f64[2,3]=-inf,-inf,-inf,0.5,-inf,0 ; %y, %l = sdpa %q, %k, %v, %m causal=false
     scale=1.0 : f64[1,1,2,3], f32[1,1,2]",
    // A choice that is not by rows changes the derivative of the others.
    "param a f64[2,3] ; input c bool[3]=1,0,1 ; %p = softmax %a dim=1 : f64[2,3] ;
     %z = full dtype=f64 shape=[] value=0.0 : f64[] ; %y = where %c, %p, %z : f64[2,3]",
    "param a f64[2,3] ; input c bool[2,1]=1,0 ; %p = softmax %a dim=1 : f64[2,3] ;
     %z = full dtype=f64 shape=[] value=0.0 : f64[] ; %q = where %c, %p, %z : f64[2,3] ;
     %y = add %p, %q : f64[2,3]",
    // Losses.
    "param a f64[3,4] ; input t i64[3]=1,-100,3 ; %y, %n = nll_loss %a, %t ignore=-100 reduction=1 :
     f64[], f64[]",
    "param a f64[3,4] ; input t i64[3]=1,-100,3 ; %y, %n = nll_loss %a, %t ignore=-100 reduction=2 :
     f64[], f64[]",
    "param a f64[3,4] ; input t i64[3]=1,-100,3 ; %y, %n = nll_loss %a, %t ignore=-100 reduction=0 :
     f64[3], f64[]",
    "param a f64[3,4] ; input t i64[3]=1,-100,3 ; %s, %n = nll_loss %a, %t ignore=-100 reduction=2 :
     f64[], f64[] ; %y = div %s, %n : f64[]",
    "param a f64[3,4] ; input t i64[3]=1,-100,3 ; param b f64[] ;
     %y = nll_sum %a, %t, %b ignore=-100 : f64[]",
    // Tables.
    "param w f64[4,2] ; input i i64[2,2]=3,1,3,0 ; %y = embedding %w, %i padding=-1 : f64[2,2,2]",
    "param a f64[2,3] ; input i i64[2,4]=2,0,2,1,1,1,0,0 ; %y = gather %a, %i dim=1 : f64[2,4]",
    "param a f64[2,3] ; input i i64[2,2]=2,0,1,0 ; param s f64[2,2] ;
     %y = scatter %a, %i, %s dim=1 : f64[2,3]",
    "param a f64[2,3] ; input i i64[1,2]=2,0 ; param s f64[2,3] ; %y = scatter %a, %i, %s dim=1 :
     f64[2,3]",
    "param a f64[2,3] ; input i i64[2,2]=2,2,1,0 ; param s f64[2,2] ; %y = scatter_add %a, %i, %s
     dim=1 : f64[2,3]",
    "param a f64[2,3] ; input i i64[2,1]=2,1 ;
     %y = scatter_value %a, %i dim=1 value=5.0 : f64[2,3]",
    "param a f64[3,2,2] ; input i i64[3]=2,0,2 ; %y = index %a, %i : f64[3,2,2]",
    "param a f64[3,2,2] ; input i i64[2,1]=2,0 ; input j i64[3]=1,0,1 ; %y = index %a, %i, %j :
     f64[2,3,2]",
    "param a f64[3,2] ; param v f64[2,2] ; input i i64[2]=2,0 ; %y = index_put %a, %v, %i
     accumulate=false : f64[3,2]",
    "param a f64[3,2] ; param v f64[2] ; input i i64[3]=2,2,0 ; %y = index_put %a, %v, %i
     accumulate=true : f64[3,2]",
    // Shapes.
    "param a f64[2,3] ; %y = reshape %a shape=[3,2] : f64[3,2]",
    "param a f64[2,3,4] ; %y = permute %a dims=[2,0,1] : f64[4,2,3]",
    "param a f64[2,1,3] ; %y = expand %a shape=[4,2,5,3] : f64[4,2,5,3]",
    "param a f64[] ; %y = expand %a shape=[2,2] : f64[2,2]",
    "param a f64[2,3] ; %y = flip %a dims=[0,1] : f64[2,3]",
    "param a f64[2,5] ; %y = slice %a dim=1 end=4 start=1 step=1 : f64[2,3]",
    "param a f64[2,5] ; %y = slice %a dim=1 end=5 start=0 step=2 : f64[2,3]",
    "param a f64[2,3] ; param s f64[2,2] ; %y = slice_scatter %a, %s dim=1 end=3 start=0 step=2 :
     f64[2,3]",
    "param a f64[2,3] ; param b f64[2,1] ; input c f64[2,2] ; %y = cat %a, %b, %c dim=1 : f64[2,6]",
    "param a f64[2,4] ; %y = pad %a pad=[1,0,-1,2] value=3.0 : f64[3,5]",
    // Dropout, the mask being fixed by the state of the random numbers.
    "param a f64[4,4] ; input r i64[2]=7,3 ; %y, %m = dropout %a, %r p=0.25 stream=1 : f64[4,4],
     bool[4,4]",
    "param a f64[4] ; input r i64[2]=7,3 ;
     %y, %m = dropout %a, %r p=1.0 stream=1 : f64[4], bool[4]",
    // Empty tensors.
    "param a f64[0,3] ; param b f64[3] ; %y = mul %a, %b : f64[0,3]",
    "param a f64[0,3] ; %y = mean %a dims=[0] keepdim=true : f64[1,3]",
    "param a f64[0,3] ; %y = amax %a dims=[1] keepdim=false : f64[0]",
    "param a f64[2,0] ; param b f64[2,1] ; %y = cat %a, %b dim=1 : f64[2,1]",
    "param a f64[2,3] ; %y = slice %a dim=1 end=2 start=2 step=1 : f64[2,0]",
    "param w f64[4,2] ; input i i64[0] ; %y = embedding %w, %i padding=-1 : f64[0,2]",
    // Slices that tile, that leave gaps, that overlap, and of several dimensions.
    "param a f64[2,6] ; %p = slice %a dim=1 end=2 start=0 step=1 : f64[2,2] ;
     %q = slice %a dim=1 end=4 start=2 step=1 : f64[2,2] ;
     %r = slice %a dim=1 end=6 start=4 step=1 : f64[2,2] ; %s = mul %p, %q : f64[2,2] ;
     %y = mul %s, %r : f64[2,2]",
    "param a f64[2,6] ; %p = slice %a dim=1 end=5 start=4 step=1 : f64[2,1] ;
     %q = slice %a dim=1 end=2 start=1 step=1 : f64[2,1] ; %y = mul %p, %q : f64[2,1]",
    "param a f64[2,6] ; %p = slice %a dim=1 end=4 start=0 step=1 : f64[2,4] ;
     %q = slice %a dim=1 end=6 start=2 step=1 : f64[2,4] ; %s = mul %p, %q : f64[2,4] ;
     %t = slice %a dim=0 end=1 start=0 step=1 : f64[1,6] ;
     %u = slice %t dim=1 end=4 start=0 step=1 : f64[1,4] ; %y = mul %s, %u : f64[2,4]",
    // Values with several readers, and one that the loss does not reach.
    "param a f64[2,3] ; %b = exp %a : f64[2,3] ; %c = mul %b, %a : f64[2,3] ;
     %d = sum %b dims=[1] keepdim=true : f64[2,1] ; %y = div %c, %d : f64[2,3]",
    "param a f64[2,3] ; %b = sign %a : f64[2,3] ; %i = ge_scalar %a value=0.0 : bool[2,3] ;
     %c = where %i, %a, %b : f64[2,3] ; %y = mul %c, %b : f64[2,3]",
];

/// Gradients by path.
type Wanted = &'static [(&'static str, &'static [f64])];

/// Functions at numbers where they have no derivative, with PyTorch's. The factors of the loss
/// are 1, and ties are between numbers that are equal in all types.
const KINKS: &[(&str, Wanted)] = &[
    (
        "param a f64[3]=1,2,3 ; param b f64[3]=1,3,2 ; %y = maximum %a, %b : f64[3]",
        &[("a", &[0.5, 0.0, 1.0]), ("b", &[0.5, 1.0, 0.0])],
    ),
    (
        "param a f64[3]=1,2,3 ; param b f64[]=2 ; %y = minimum %a, %b : f64[3]",
        &[("a", &[1.0, 0.5, 0.0]), ("b", &[1.5])],
    ),
    (
        "param a f64[2,4]=5,1,5,5,2,2,1,0 ; %y = amax %a dims=[1] keepdim=false : f64[2]",
        &[(
            "a",
            &[1.0 / 3.0, 0.0, 1.0 / 3.0, 1.0 / 3.0, 0.5, 0.5, 0.0, 0.0],
        )],
    ),
    (
        "param a f64[2,2]=1,2,1,1 ; %y = amin %a dims=[0,1] keepdim=true : f64[1,1]",
        &[("a", &[1.0 / 3.0, 0.0, 1.0 / 3.0, 1.0 / 3.0])],
    ),
    (
        "param a f64[4]=-1,-0.5,0.5,1 ; %y = clamp %a max=0.5 min=-0.5 : f64[4]",
        &[("a", &[0.0, 1.0, 1.0, 0.0])],
    ),
    (
        "param a f64[3]=-1,0,1 ; %y = relu %a : f64[3]",
        &[("a", &[0.0, 0.0, 1.0])],
    ),
    (
        "param a f64[3]=-1,0,1 ; %y = abs %a : f64[3]",
        &[("a", &[-1.0, 0.0, 1.0])],
    ),
    (
        "param a f64[2]=0,3 ; %y = pow_scalar %a value=0.0 : f64[2]",
        &[],
    ),
    (
        "param a f64[2]=0,0 ; param b f64[2]=2,0 ; %y = pow %a, %b : f64[2]",
        &[("a", &[0.0, 0.0]), ("b", &[0.0, 0.0])],
    ),
    (
        "param w f64[3,2]=1,2,3,4,5,6 ; input i i64[3]=2,0,2 ;
         %y = embedding %w, %i padding=2 : f64[3,2]",
        &[("w", &[1.0, 1.0, 0.0, 0.0, 0.0, 0.0])],
    ),
    (
        "param a f64[2,1]=1,2 ; %b = cast %a dtype=bf16 : bf16[2,1] ;
         input c bf16[1,2]=3,4 ; input d f32[2,2]=1,1,1,1 ;
         %m = matmul_sum %b, %c, %d ta=false tb=false : f32[2,2] ;
         %y = cast %m dtype=f64 : f64[2,2]",
        &[("a", &[7.0, 7.0])],
    ),
    (
        "input b bf16[2,1]=1,2 ; param c bf16[2,1]=3,4 ; param d f32[2,2]=1,1,1,1 ;
         %m = matmul_sum %b, %c, %d ta=false tb=true : f32[2,2] ;
         %y = cast %m dtype=f64 : f64[2,2]",
        &[("c", &[3.0, 3.0]), ("d", &[1.0; 4])],
    ),
];

/// A forward with its loss, and its numbers.
struct Case {
    graph: Graph,
    states: Tensors,
    inputs: Tensors,
}

impl Case {
    /// A case from its text, with another type in place of f64.
    fn new(case: &str, dtype: &str, are_ones: bool) -> Case {
        let mut random = Random(case.len() as u64);
        let statistics = if dtype == "f64" { "f64" } else { "f32" };
        let case = case.replace("f64", dtype).replace("stat", statistics);
        let (mut states, mut inputs) = (Tensors::new(), Tensors::new());
        let (mut head, mut params, mut body) = (String::new(), String::new(), String::new());
        for part in case.split(';').map(str::trim) {
            let words: Vec<&str> = part.split_whitespace().collect();
            let (kind, name, spec) = match words[..] {
                [kind @ ("param" | "input"), name, spec] => (kind, name, spec),
                _ => {
                    body += &format!("  fwd m {}\n", words.join(" "));
                    continue;
                }
            };
            let ty = spec.split(['+', '=']).next().expect("a type");
            let bytes = numbers(&parse_type(ty).expect("a type"), spec, &mut random);
            match kind {
                "param" => {
                    params += &format!("  state param %{name} -> %{name} : {ty} \"{name}\"\n");
                    states.insert(name.to_string(), bytes);
                }
                _ => {
                    head += &format!("  input %{name} : {ty}\n");
                    inputs.insert(name.to_string(), bytes);
                }
            }
        }
        let text = format!("graph case {{\n{head}{params}{body}}}\n");
        let mut graph = text::parse_graph(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let loss = loss(&mut graph, are_ones, &mut inputs, &mut random);
        let name = autodiff::LOSS.to_string();
        graph.outputs = vec![Output { name, value: loss }];
        Case {
            graph,
            states,
            inputs,
        }
    }

    fn loss(&self, states: &Tensors) -> f64 {
        let outputs = evaluate::step(&self.graph, &mut states.clone(), &self.inputs);
        let outputs = outputs.unwrap_or_else(|e| panic!("{e}\n{}", text::print_graph(&self.graph)));
        let bytes = outputs[autodiff::LOSS][..].try_into();
        f64::from_le_bytes(bytes.expect("a loss should be f64"))
    }

    /// The gradients by path; none of parameters that the loss does not depend on.
    fn gradients(&self) -> BTreeMap<String, Vec<f64>> {
        let mut graph = self.graph.clone();
        match autodiff::differentiate(&mut graph) {
            Err(autodiff::AutodiffError::Independent(_)) => return BTreeMap::new(),
            other => other.unwrap_or_else(|e| panic!("{e}\n{}", text::print_graph(&self.graph))),
        }
        assert_eq!(
            ir::verify::graph(&graph),
            [],
            "{}",
            text::print_graph(&graph)
        );
        let types: BTreeMap<String, TensorType> = graph
            .gradients
            .iter()
            .map(|&(state, value)| {
                let state = &graph.states[state];
                let ty = &graph.values[value].ty;
                assert_eq!(*ty, graph.values[state.before].ty, "{}", state.path);
                (state.path.clone(), ty.clone())
            })
            .collect();
        optimizer::run(&mut graph, Optimizer::None).expect("gradients should become outputs");
        let found = evaluate::step(&graph, &mut self.states.clone(), &self.inputs)
            .unwrap_or_else(|e| panic!("{e}\n{}", text::print_graph(&graph)));
        let read = |(path, ty): (String, TensorType)| {
            let bytes = &found[&format!("grad.{path}")];
            let tensor = OwnedTensor::from_bytes(codegen::dtype(ty.dtype()), &shape_of(&ty), bytes);
            (path, tensor.to_f64s())
        };
        types.into_iter().map(read).collect()
    }
}

/// The numbers of a declaration.
fn numbers(ty: &TensorType, spec: &str, random: &mut Random) -> Vec<u8> {
    let (dtype, shape) = (codegen::dtype(ty.dtype()), shape_of(ty));
    let given = spec.split_once('=').map(|(_, numbers)| numbers.split(','));
    let numbers: Vec<f64> = match given {
        Some(given) => given.map(|n| n.parse().expect("a number")).collect(),
        None => (0..ty.numel())
            .map(|_| {
                let x = random.unit();
                let apart = if x.abs() < 0.05 { x + 0.1 } else { x };
                if spec.ends_with('+') {
                    0.5 + apart.abs()
                } else {
                    apart
                }
            })
            .collect(),
    };
    OwnedTensor::from_f64s(dtype, &shape, &numbers).bytes()
}

/// Adds the loss: the sum of `%y` times an input, in f64.
fn loss(graph: &mut Graph, are_ones: bool, inputs: &mut Tensors, random: &mut Random) -> Value {
    let y = graph
        .values
        .iter()
        .find(|(_, value)| value.name == "y")
        .expect("a result y")
        .0;
    let n = graph.values[y].ty.numel();
    let ty = TensorType::new(ir::DType::F64, [n]).expect("a small tensor");
    let spec = if are_ones {
        format!("={}", ["1"].repeat(n as usize).join(","))
    } else {
        String::new()
    };
    inputs.insert("factors".into(), numbers(&ty, &spec, random));
    let factors = graph.add_input("factors", ty);
    let cast = ir::op::attrs::Cast {
        dtype: ir::DType::F64,
    };
    let sizes = ir::op::attrs::Sizes {
        shape: vec![n as i64],
    };
    let all = Reduction {
        dims: vec![0],
        keepdim: false,
    };
    let mut node = |op, operands: &[Value], name: &str| {
        let made = graph.add_node(op, operands, &[name.to_string()], Phase::Forward, "loss");
        made.expect("the loss should fit")[0]
    };
    let y = node(Op::Cast(cast), &[y], "wide");
    let y = node(Op::Reshape(sizes), &[y], "flat");
    let y = node(Op::Mul, &[y, factors], "weighed");
    node(Op::Sum(all), &[y], "loss")
}

/// Half of the distance between the two numbers of a central difference.
const STEP: f64 = 1e-6;
/// The allowed error, as a share of the largest derivative of the case, and at least of 1. The
/// difference of two losses near 1 has an error of 1e-16 / STEP.
const CLOSE: f64 = 1e-6;

#[test]
fn rules_agree_with_central_differences() {
    for text in SMOOTH {
        let case = Case::new(text, "f64", false);
        let gradients = case.gradients();
        assert_eq!(
            gradients.len(),
            case.states.len(),
            "each parameter has a gradient: {text}"
        );
        let largest = gradients
            .values()
            .flatten()
            .fold(1f64, |m, x| m.max(x.abs()));
        for (path, found) in &gradients {
            for (i, &found) in found.iter().enumerate() {
                let at = |step: f64| {
                    let mut states = case.states.clone();
                    let number = &mut states.get_mut(path).expect("a state")[8 * i..8 * i + 8];
                    let x = f64::from_le_bytes((*number).try_into().expect("8 bytes"));
                    number.copy_from_slice(&(x + step).to_le_bytes());
                    case.loss(&states)
                };
                let expected = (at(STEP) - at(-STEP)) / (2.0 * STEP);
                assert!(
                    (found - expected).abs() <= CLOSE * largest,
                    "{path}[{i}] is {found}, the difference {expected}: {text}"
                );
            }
        }
    }
}

#[test]
fn where_there_is_no_derivative_pytorchs_is_taken() {
    for (text, wanted) in KINKS {
        let found = Case::new(text, "f64", true).gradients();
        assert_eq!(found.len(), wanted.len(), "{text}");
        for (path, wanted) in *wanted {
            assert_eq!(found[*path], *wanted, "{path}: {text}");
        }
    }
}

/// In half precision the same nodes are right: their types fit, and gradients have the parameter's
/// type.
#[test]
fn rules_hold_for_half_precision() {
    for dtype in ["f32", "bf16", "f16"] {
        // A sum that starts at an f64 is f64.
        for text in SMOOTH.iter().filter(|text| !text.contains("nll_sum")) {
            let case = Case::new(text, dtype, false);
            let half = case.gradients();
            let double = Case::new(text, "f64", false).gradients();
            for (path, expected) in &double {
                let largest = expected.iter().fold(1f64, |m, x| m.max(x.abs()));
                for (found, expected) in half[path].iter().zip(expected) {
                    let error = (found - expected).abs();
                    assert!(
                        error <= 0.12 * largest,
                        "{path}: {found} {expected}: {dtype} {text}"
                    );
                }
            }
        }
    }
}

#[test]
fn every_rule_has_a_case() {
    let smooth = SMOOTH.iter().map(|text| Case::new(text, "f64", false));
    let kinks = KINKS.iter().map(|(text, _)| Case::new(text, "f64", true));
    let mut covered = BTreeSet::new();
    for case in smooth.chain(kinks) {
        covered.extend(case.graph.nodes.values().map(|node| node.op.name()));
    }
    let has_rule = |op: &&OpKind| matches!(derivative(**op), Derivative::Rule(_));
    let missing: Vec<&str> = OpKind::ALL
        .iter()
        .filter(has_rule)
        .map(|op| op.name())
        .filter(|name| !covered.contains(name))
        .collect();
    assert!(missing.is_empty(), "rules without a case: {missing:?}");
}
