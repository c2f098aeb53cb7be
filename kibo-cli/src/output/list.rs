//! A part of a list in JSON: the objects under the name of their kind, then the token of the next page.

use serde::{Serialize, Serializer, ser::SerializeMap as _};

use crate::client::Listed;

/// One of a list of `V`s.
pub struct ListView<'a, V> {
    /// Of all of them, as `nodes`.
    name: &'static str,
    items: Vec<V>,
    next_page_token: Option<&'a str>,
}

impl<K> Listed<K> {
    /// With each object as `one` shows it.
    pub fn view<'a, V>(&'a self, name: &'static str, one: impl Fn(&'a K) -> V) -> ListView<'a, V> {
        ListView { name, items: self.items.iter().map(one).collect(), next_page_token: self.next_page_token.as_deref() }
    }
}

impl<V: Serialize> Serialize for ListView<'_, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(2))?;
        map.serialize_entry(self.name, &self.items)?;
        map.serialize_entry("next_page_token", &self.next_page_token)?;
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_objects_come_before_the_token() {
        let listed = Listed { items: vec![1, 2], next_page_token: None };
        let text = serde_json::to_string(&listed.view("nodes", |number| number * 10)).unwrap();
        assert_eq!(text, r#"{"nodes":[10,20],"next_page_token":null}"#);
    }
}
