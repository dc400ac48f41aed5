from policies.prefix.members import TIERS, Members, level_of


def test_each_member_has_a_bit_for_each_tier() -> None:
    members = Members()
    bits = [members.bit(name, level) for name in ("a", "b") for level in range(len(TIERS))]
    assert sorted(bits) == [1 << place for place in range(2 * len(TIERS))]
    assert members.bits("a") | members.bits("b") == members.live
    assert members.names(members.firsts) == ("a", "b")
    members.check()


def test_a_number_is_given_again_only_when_it_is_clean() -> None:
    members = Members()
    first = members.bit("a", 0)
    left = members.leave("a")
    assert members.leave("a") == 0
    assert members.bit("b", 0) != first
    members.clean(left)
    assert members.bit("c", 0) == first
    assert "a" not in members
    assert len(members) == 2
    members.check()


def test_what_a_faster_tier_has_a_slower_one_reaches_too() -> None:
    members = Members()
    device, host, disk = (members.bit("a", level) for level in range(3))
    assert members.reach(device) == device | host | disk
    assert members.reach(host) == host | disk
    assert members.reach(disk) == disk
    members.leave("a")
    assert members.reach(device) == 0


def test_without_slower_tiers_only_first_bits_count() -> None:
    members = Members()
    device = members.bit("a", 0)
    assert members.reach(device | 0b110) == device
    assert not members.has_slower


def test_tiers_of_other_names_are_the_slowest() -> None:
    assert [level_of(tier) for tier in ("device", "host", "disk", "tape")] == [0, 1, 2, 2]


def test_names_are_remembered_within_bounds() -> None:
    members = Members()
    bits = [members.bit(f"b{number}", 0) for number in range(12)]
    for mask in range(1, 2**12):
        picked = sum(bit for place, bit in enumerate(bits) if mask >> place & 1)
        assert len(members.names(picked)) == mask.bit_count()
