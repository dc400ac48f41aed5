from __future__ import annotations

from shards.kv.lending import MOST_OUT, Lent, Loan
from tests.shards.driver import Driver, some_tokens

SECRET = b"of the shards"
BLOCKS = 20


def a_lender() -> Driver:
    """A shard that holds BLOCKS blocks of one prompt."""
    driver = Driver(kv_blocks=64, kv_listen=("127.0.0.1", 0), kv_secret=SECRET)
    driver.ask("it", some_tokens(BLOCKS * 64))
    driver.run()
    return driver


def handed_over(driver: Driver, loan: Loan) -> list[Lent]:
    for _ in range(5):
        driver.step()
    lent = [loan.next(0.0) for _ in range(loan._lent.qsize())]
    return [each for each in lent if each is not None]


def test_a_borrower_that_returns_nothing_keeps_a_few_blocks_only() -> None:
    driver = a_lender()
    lending = driver.engine._pool.lending
    assert lending._lending is not None
    loan = lending.ask([lending._lending.labels.of(cached) for cached in driver.engine._pool.prefix])
    total = 0
    while lent := handed_over(driver, loan):
        assert len(lent) <= MOST_OUT
        assert not handed_over(driver, loan), "nothing more before something is returned"
        total += len(lent)
        for each in lent:
            loan.give_back(each)
    assert total == BLOCKS
    loan.end()
    driver.step()
    assert not lending.is_busy
    driver.engine.close()
