//! The linear relaxation of a stage's knapsack: the least cost of a bag in so many bytes, if layers could be split between choices.

use crate::stage::Group;

/// The lower convex hull of (bytes, cost), from least bytes to least cost, with the choice at each corner.
pub(crate) type Hull = Vec<(u64, u64, u32)>;

/// A solved linear relaxation.
pub(crate) struct Lp {
    /// Rounded up: costs are whole.
    pub value: u64,
    /// What a byte is worth: so much cost for so many bytes.
    pub price: (u64, u64),
    /// For each group, how many layers are at which corner of its hull, rounded so that they fit.
    pub corners: Vec<[(usize, usize); 2]>,
}

/// The hull of some points.
pub(crate) fn corners(mut points: Hull) -> Hull {
    points.sort_unstable();
    hull(points.into_iter())
}

/// The hull of points that come by rising bytes; of equal ones the first.
pub(crate) fn hull(points: impl Iterator<Item = (u64, u64, u32)>) -> Hull {
    let mut hull = Hull::new();
    points.for_each(|p| extend(&mut hull, p));
    hull
}

/// Adds a point with no fewer bytes than those before it.
pub(crate) fn extend(hull: &mut Hull, p: (u64, u64, u32)) {
    if hull.last().is_some_and(|last| last.1 <= p.1) {
        return;
    }
    if hull.last().is_some_and(|last| last.0 == p.0) {
        hull.pop();
    }
    // Drop corners above the line from the one before to the new one.
    while let [.., a, b] = hull[..]
        && u128::from(a.1 - b.1) * u128::from(p.0 - a.0) <= u128::from(a.1 - p.1) * u128::from(b.0 - a.0)
    {
        hull.pop();
    }
    hull.push(p);
}

/// The least cost of a bag in so many bytes when layers may be split: from least bytes, the best bargains first.
pub(crate) fn lp(bag: &[Group], hulls: &[&Hull], room: u64) -> Option<Lp> {
    let count = |g: usize| bag[g].count as u64;
    let mut free = (0..bag.len()).try_fold(room, |free, g| free.checked_sub(count(g) * hulls[g][0].0))?;
    let mut value: u64 = (0..bag.len()).map(|g| count(g) * hulls[g][0].1).sum();
    let mut corners: Vec<[(usize, usize); 2]> = bag.iter().map(|g| [(0, g.count), (0, 0)]).collect();
    let mut price = (0, 1);
    loop {
        let bargain = |g: &usize| {
            let corner = corners[*g][0].0;
            hulls[*g].get(corner + 1).map(|next| (hulls[*g][corner].1 - next.1, next.0 - hulls[*g][corner].0))
        };
        let better = |a: (u64, u64), b: (u64, u64)| u128::from(a.0) * u128::from(b.1) > u128::from(b.0) * u128::from(a.1);
        let mut best: Option<(usize, (u64, u64))> = None;
        for g in 0..bag.len() {
            if let Some(offer) = bargain(&g)
                && best.is_none_or(|(_, b)| better(offer, b))
            {
                best = Some((g, offer));
            }
        }
        let Some((g, (saved, bytes))) = best else { break };
        let corner = corners[g][0].0;
        if count(g) * bytes <= free {
            (free, value) = (free - count(g) * bytes, value - count(g) * saved);
            corners[g][0].0 += 1;
            continue;
        }
        let whole = usize::try_from(free / bytes).unwrap_or(0);
        corners[g] = [(corner, bag[g].count - whole), (corner + 1, whole)];
        value -= u64::try_from(u128::from(saved) * u128::from(free) / u128::from(bytes)).unwrap_or(0);
        price = (saved, bytes);
        break;
    }
    Some(Lp { value, price, corners })
}
