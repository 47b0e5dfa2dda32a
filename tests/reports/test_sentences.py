"""A fact is said with the same words everywhere."""

from dflash_core.reports.sentences import percent, reasons_text, rows_text, share_of, short


def test_rows_are_kept_dropped_or_rejected() -> None:
    assert rows_text(1000, 980, 12, 8) == "1,000 rows read: 980 kept, 12 dropped, 8 rejected"
    assert rows_text(1000, 980, None, 20) == "1,000 rows read: 980 kept, 20 rejected"
    assert reasons_text({"too few": 1200, "none": 3}) == "too few 1,200, none 3"
    assert reasons_text(None) == reasons_text({}) == "nothing"


def test_shares_and_long_names() -> None:
    assert (percent(0.8725), share_of(1, 3), share_of(0, 0)) == ("87.2 %", "33.3 %", "0.0 %")
    assert short("short", 5) == "short"
    assert (short("a long name", 5), len(short("a long name" * 9, 22))) == ("a …me", 22)
