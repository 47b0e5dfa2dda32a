"""Everything people look at: pictures, pages and cards, with one palette and one wording."""
