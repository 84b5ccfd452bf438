//! The least of a function of a few numbers, by the simplex of Nelder and Mead: no derivatives, the same steps on every run.

/// Where `f` is least near `start`, after `rounds` changes of the simplex. `spread` is the first step in each direction, as a part of `start`.
pub fn minimise(f: impl Fn(&[f64]) -> f64, start: &[f64], spread: &[f64], rounds: usize) -> Vec<f64> {
    let n = start.len();
    let mut corners: Vec<Vec<f64>> = vec![start.to_vec()];
    for i in 0..n {
        let mut corner = start.to_vec();
        corner[i] *= 1.0 + spread[i];
        corners.push(corner);
    }
    let mut simplex: Vec<(f64, Vec<f64>)> = corners.into_iter().map(|c| (f(&c), c)).collect();
    for _ in 0..rounds {
        simplex.sort_by(|a, b| a.0.total_cmp(&b.0));
        let centre: Vec<f64> = (0..n).map(|j| simplex[..n].iter().map(|(_, c)| c[j]).sum::<f64>() / n as f64).collect();
        let along = |t: f64| -> Vec<f64> { centre.iter().zip(&simplex[n].1).map(|(c, w)| c + t * (w - c)).collect() };
        let value = |corner: Vec<f64>| (f(&corner), corner);
        let reflected = value(along(-1.0));
        let (best, second, worst) = (simplex[0].0, simplex[n - 1].0, simplex[n].0);
        if reflected.0 < best {
            let further = value(along(-2.0));
            simplex[n] = if further.0 < reflected.0 { further } else { reflected };
        } else if reflected.0 < second {
            simplex[n] = reflected;
        } else {
            let nearer = value(along(0.5));
            if nearer.0 < worst {
                simplex[n] = nearer;
            } else {
                let centre = simplex[0].1.clone();
                for (v, corner) in &mut simplex[1..] {
                    corner.iter_mut().zip(&centre).for_each(|(x, c)| *x = 0.5 * (*x + c));
                    *v = f(corner);
                }
            }
        }
    }
    simplex.sort_by(|a, b| a.0.total_cmp(&b.0));
    simplex.swap_remove(0).1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bent_valley_is_followed_to_its_end() {
        let found = minimise(|x| (1.0 - x[0]).powi(2) + 100.0 * (x[1] - x[0] * x[0]).powi(2), &[-1.2, 1.0], &[0.5, 0.5], 300);
        assert!((found[0] - 1.0).abs() < 1e-4 && (found[1] - 1.0).abs() < 1e-4, "{found:?}");
    }
}
