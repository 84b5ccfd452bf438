//! Which ways of splitting lie on which links: how they are nested on the ranks of a stage.

use std::fmt;

/// What ranks are split by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Way {
    Data,
    Expert,
    Context,
    Tensor,
}

impl Way {
    pub const ALL: [Way; 4] = [Way::Data, Way::Expert, Way::Context, Way::Tensor];
    pub fn name(self) -> &'static str {
        match self {
            Way::Data => "dp",
            Way::Expert => "ep",
            Way::Context => "cp",
            Way::Tensor => "tp",
        }
    }
}

/// All ways of splitting, the outermost first: ranks that are next to each other differ in the last, so that the last lie on the quickest links. What data parallelism
/// is cut up into ([`crate::sync`]) stays together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Nest(pub [Way; 4]);

impl Default for Nest {
    fn default() -> Nest {
        Nest(Way::ALL)
    }
}

impl Nest {
    /// All orders, rising.
    pub fn all() -> Vec<Nest> {
        let mut all: Vec<Vec<Way>> = vec![Vec::new()];
        for _ in Way::ALL {
            let longer = |nest: &Vec<Way>| Way::ALL.into_iter().filter(|w| !nest.contains(w)).map(|w| [&nest[..], &[w]].concat()).collect::<Vec<_>>();
            all = all.iter().flat_map(longer).collect();
        }
        all.into_iter().filter_map(|nest| <[Way; 4]>::try_from(nest).ok().map(Nest)).collect()
    }

    /// `tp.dp`: what is not named lies outside of what is, in the usual order.
    pub fn from_name(name: &str) -> Option<Nest> {
        let named: Vec<Way> = name.split('.').map(|n| Way::ALL.into_iter().find(|w| w.name() == n)).collect::<Option<_>>()?;
        let rest = Way::ALL.into_iter().filter(|w| !named.contains(w));
        <[Way; 4]>::try_from(rest.chain(named.iter().copied()).collect::<Vec<_>>()).ok().map(Nest)
    }
}

impl fmt::Display for Nest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.map(Way::name).join("."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_read_back_and_are_all_there_are() {
        let all = Nest::all();
        assert_eq!((all.len(), all[0]), (24, Nest::default()));
        assert!(all.windows(2).all(|w| w[0] < w[1]));
        assert!(all.iter().all(|nest| Nest::from_name(&nest.to_string()) == Some(*nest)));
        assert_eq!(Nest::from_name("tp.dp").map(|n| n.to_string()).as_deref(), Some("ep.cp.tp.dp"));
        for name in ["", "dp.dp", "dp,tp", "dp.pp", "dp."] {
            assert_eq!(Nest::from_name(name), None, "{name}");
        }
    }
}
