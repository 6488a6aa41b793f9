use std::time::Instant;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use super::data::*;
use super::error::Result;
use super::model::*;
use super::options::*;
use rope_burn::{Rotary, RotaryAngles, Implementation};
use rope_core::{Layout, Positions};


struct Batch { patches: Tensor<3>, words: Tensor<2, Int>, targets: Tensor<1, Int> }

fn batch(d: &Digits, c: super::clip::Clip, qs: &[Question], dev: &Device) -> Batch {
    let n = qs.len();
    let px: Vec<f32> = qs.iter().flat_map(|q| q.digits.iter().flat_map(|&i| *d.image(i))).collect();
    let w: Vec<i64> = qs.iter().flat_map(|q| c.words(q.cell)).collect();
    let t: Vec<i64> = qs.iter().map(|q| d.answer(q) as i64).collect();
    Batch {
        patches: Tensor::from_data(TensorData::new(px, [n, c.cells(), PIXELS]), dev),
        words: Tensor::from_data(TensorData::new(w, [n, 5]), dev),
        targets: Tensor::from_data(TensorData::new(t, [n]), dev),
    }
}

pub(crate) fn quick(cfg: &RunConfig) -> Result<()> {
    let dev = Device::flex();
    dev.seed(cfg.seed);
    let ad = dev.clone().autodiff();
    let d = Digits::load()?;
    let clip = cfg.clip();
    let mc = ModelConfig::new(clip.vocabulary()).with_width(cfg.width).with_hidden(cfg.width * 2).with_layers(cfg.layers);
    let spec = cfg.spec(mc.head_dim)?;
    let rotary = (cfg.rotary != Rotation::None).then(|| Rotary::new(spec.clone(), Layout::Bsnd).with_implementation(if cfg.rotary == Rotation::Fused { Implementation::Fused } else { Implementation::Composed }));
    let pos = Positions::new(spec.axes(), &clip.position_ids(cfg.axes))?;
    let angles = rotary.as_ref().map(|r| r.angles(&pos, &ad));
    let angles_dev = rotary.as_ref().map(|r| r.angles(&pos, &dev));
    let mut model = mc.init(rotary, &ad);
    eprintln!("params {}", model.num_params());
    let mask = attention_mask(clip, &ad);
    let mask_dev = attention_mask(clip, &dev);
    let mut optim = AdamWConfig::new().with_weight_decay(cfg.decay).with_beta_2(ev("B2",0.98) as f32).with_epsilon(ev("EPS",1e-8) as f32).init();
    let ce = CrossEntropyLossConfig::new().init(&ad);
    let ce_dev = CrossEntropyLossConfig::new().init(&dev);
    let test = d.questions(Split::Test, clip, 1024, &mut rng(0, Draw::Test));
    eprintln!("chance {}", d.accuracy_without_position(&test));
    let t0 = Instant::now();
    let mut run = 0.0f32;
    for step in 0..cfg.steps {
        let qs = d.questions(Split::Train, clip, cfg.batch, &mut rng(cfg.seed, Draw::Step(step)));
        let b = batch(&d, clip, &qs, &ad);
        let out = model.forward(b.patches, b.words, &mask, angles.as_ref());
        let loss = ce.forward(out.logits, b.targets);
        let l: f32 = loss.clone().into_scalar();
        run = if step == 0 { l } else { 0.95 * run + 0.05 * l };
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let warm = 50.0f64.min(cfg.steps as f64 / 10.0);
        let s = step as f64;
        let lr = cfg.lr * ((s + 1.0) / warm).min(1.0) * (0.5 * (1.0 + (std::f64::consts::PI * s / cfg.steps as f64).cos()));
        model = optim.step(lr, model, grads);
        if (step + 1) % 100 == 0 {
            let m = model.valid();
            let b = batch(&d, clip, &test, &dev);
            let out = m.forward(b.patches, b.words, &mask_dev, angles_dev.as_ref());
            let tl: f32 = ce_dev.forward(out.logits.clone(), b.targets.clone()).into_scalar();
            let acc: f32 = out.logits.argmax(1).squeeze_dim::<1>(1).equal(b.targets).float().mean().into_scalar();
            eprintln!("{:5} loss {run:.4} test {tl:.4} acc {acc:.4} {:.1}s", step + 1, t0.elapsed().as_secs_f64());
        }
    }
    Ok(())
}

pub(crate) fn ev(n: &str, d: f64) -> f64 { std::env::var(n).ok().and_then(|v| v.parse().ok()).unwrap_or(d) }
