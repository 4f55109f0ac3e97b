"""Following engines over real sockets: states, keys and loads follow what the engine says."""

from __future__ import annotations

from dataclasses import replace

from octavo_engine.protocol.loading import LoadProgress
from octavo_engine.protocol.stream import Draining, Hello, Load, Snapshot
from tests.fakes.engine_stream import EngineStream, pack_evicted, pack_frame, pack_stored
from tests.fakes.facts import run, until
from tests.fakes.listening import FAST, listening


def test_an_engine_becomes_ready_with_its_name_and_its_keys():
    async def story() -> None:
        hello = Hello(
            "e1", "m", ["m", "alias"], ["lora"], max_model_len=2048, max_num_seqs=8, vocab_size=512
        )
        engine = EngineStream(hello, stored=pack_stored((5, 16), (6, 32)))
        async with engine, listening() as router:
            (endpoint,) = router.add(engine.spec())
            assert endpoint.state == "connecting"
            await engine.peer()
            await until(lambda: endpoint.state == "ready")
            assert endpoint.kind == "octavo"
            assert endpoint.names == ("m", "alias")
            assert endpoint.adapters == {"lora"}
            assert (endpoint.max_model_len, endpoint.max_num_seqs) == (2048, 8)
            assert endpoint.vocab_size == 512
            assert router.index.num_keys(endpoint.slot) == 2
            assert router.registry.routable("default") == [endpoint]

    run(story())


def test_deltas_move_keys_and_load():
    async def story() -> None:
        engine = EngineStream(stored=pack_stored((5, 16)))
        async with engine, listening() as router:
            (endpoint,) = router.add(engine.spec())
            peer = await engine.peer()
            load = Load(running=3, waiting=1, queued_tokens=70, kv_usage=0.5)
            peer.delta(stored=pack_stored((6, 32), (7, 48)), evicted=pack_evicted(5), load=load)
            await until(lambda: endpoint.load == load)
            assert router.index.num_keys(endpoint.slot) == 2
            told_at = endpoint.load_at
            assert told_at is not None
            peer.delta()  # a heartbeat: the load is as before, and as fresh as now
            await until(lambda: endpoint.load_at != told_at)
            assert endpoint.load == load

    run(story())


def test_frames_split_at_every_byte_are_the_same_frames():
    async def story() -> None:
        engine = EngineStream(greets=False)
        async with engine, listening() as router:
            (endpoint,) = router.add(engine.spec())
            peer = await engine.peer()
            whole = pack_frame(engine.hello) + pack_frame(Snapshot(pack_stored((1, 16)), last=True))
            for at in range(len(whole)):
                peer.send(whole[at : at + 1])
                await peer.writer.drain()
            await until(lambda: endpoint.state == "ready")
            assert router.index.num_keys(endpoint.slot) == 1

    run(story())


def test_a_gap_forgets_the_keys_and_keeps_the_engine_in_rotation():
    async def story() -> None:
        engine = EngineStream(stored=pack_stored((5, 16)))
        async with engine, listening() as router:
            (endpoint,) = router.add(engine.spec())
            peer = await engine.peer()
            await until(lambda: endpoint.state == "ready")
            states: list[str] = []
            router.registry.subscribe(lambda change: states.append(change.endpoint.state))
            engine.stored = pack_stored((8, 16), (9, 32))
            peer.delta(seq=1)
            peer.delta(seq=3, stored=pack_stored((6, 32)))
            await engine.peer()
            await until(lambda: router.index.num_keys(endpoint.slot) == 2)
            assert set(states) <= {"ready"}
            assert router.metrics.signals.breaks["gap",] == 1

    run(story())


def test_repeated_and_reordered_deltas_start_the_story_again():
    async def story() -> None:
        engine = EngineStream()
        async with engine, listening() as router:
            router.add(engine.spec())
            for seqs in ((4, 4), (4, 5, 3)):
                peer = await engine.peer()
                for seq in seqs:
                    peer.delta(seq=seq)
            await engine.peer()
            assert router.metrics.signals.breaks["repeat",] == 2

    run(story())


def test_a_new_epoch_starts_from_nothing():
    async def story() -> None:
        engine = EngineStream(stored=pack_stored((5, 16)))
        async with engine, listening() as router:
            (endpoint,) = router.add(engine.spec())
            peer = await engine.peer()
            await until(lambda: endpoint.epoch == "e1")
            engine.hello = replace(engine.hello, epoch="e2")
            engine.stored = b""
            peer.reset()
            await until(lambda: endpoint.epoch == "e2" and endpoint.state == "ready")
            assert router.index.num_keys(endpoint.slot) == 0

    run(story())


def test_a_killed_engine_is_down_when_its_connection_closes():
    async def story() -> None:
        async with EngineStream(stored=pack_stored((5, 16))) as engine, listening() as router:
            (endpoint,) = router.add(engine.spec())
            await engine.peer()
            await until(lambda: endpoint.state == "ready")
            await engine.stop()
            await until(lambda: endpoint.state == "down")
            assert router.registry.routable("default") == []
            assert router.index.num_keys(endpoint.slot) == 0
            await engine.start()
            await until(lambda: endpoint.state == "ready")

    run(story())


def test_a_silent_engine_is_down():
    async def story() -> None:
        settings = replace(FAST, silence_s=0.05, backoff_min_s=5.0, backoff_max_s=5.0)
        async with EngineStream() as engine, listening(settings) as router:
            (endpoint,) = router.add(engine.spec())
            await engine.peer()
            await until(lambda: endpoint.state == "ready")
            await until(lambda: endpoint.state == "down")
            assert endpoint.reason == "nothing was heard for 0.05 s"
            assert router.metrics.signals.breaks["silence",] == 1

    run(story())


def test_draining_takes_effect_at_once_and_closing_then_means_down():
    async def story() -> None:
        async with EngineStream() as engine, listening() as router:
            (endpoint,) = router.add(engine.spec())
            peer = await engine.peer()
            await until(lambda: endpoint.state == "ready")
            peer.say(Draining(30.0))
            await until(lambda: endpoint.state == "draining")
            peer.delta(load=Load(running=1))  # it still tells how it fares
            await until(lambda: endpoint.load.running == 1)
            assert endpoint.state == "draining"
            await engine.stop()
            await until(lambda: endpoint.state == "down")

    run(story())


def test_another_pod_at_the_address_gets_nothing():
    async def story() -> None:
        hello = Hello("e1", "m", ["m"], pod_uid="stranger")
        async with EngineStream(hello) as engine, listening() as router:
            (endpoint,) = router.add(engine.spec(pod_uid="ours"))
            await engine.peer()
            await until(lambda: "stranger" in endpoint.reason)
            assert endpoint.state == "connecting"
            assert router.registry.routable("default") == []

    run(story())


def test_an_engine_that_loads_is_asked_again_until_it_has_a_stream():
    async def story() -> None:
        async with EngineStream(status=503) as engine, listening() as router:
            (endpoint,) = router.add(engine.spec())
            await until(lambda: "503" in endpoint.reason)
            assert endpoint.state == "connecting"
            assert endpoint.loading is None
            engine.refusal = b'{"state": "loading", "progress": 0.42}'
            await until(lambda: endpoint.loading == 0.42)
            assert endpoint.progress is None
            engine.refusal = (
                b'{"state": "loading", "progress": 0.5, "loading":'
                b' {"phase": "fetching", "bytes_done": 7, "bytes_total": 14, "more": 1}}'
            )
            await until(lambda: endpoint.progress == LoadProgress("fetching", 7, 14))
            engine.refusal = b'{"state": "loading", "progress": 0.6, "loading": ["much"]}'
            await until(lambda: endpoint.loading == 0.6)
            assert endpoint.progress is None
            engine.refusal = b'{"state": "loading", "progress": "much"}'
            await until(lambda: endpoint.loading is None)
            engine.status = 200
            await until(lambda: endpoint.state == "ready")
            assert (endpoint.loading, endpoint.progress) == (None, None)

    run(story())


def test_news_of_discovery_end_the_pause():
    async def story() -> None:
        settings = replace(FAST, backoff_min_s=60.0, backoff_max_s=60.0)
        engine = EngineStream(status=503)
        async with engine, EngineStream() as other, listening(settings) as router:
            (endpoint,) = router.add(engine.spec())
            await until(lambda: "503" in endpoint.reason)
            router.add(other.spec())  # the same process at another address
            await other.peer()
            await until(lambda: endpoint.state == "ready")

    run(story())


def test_a_platform_that_says_not_ready_keeps_the_keys_and_sends_nothing():
    async def story() -> None:
        async with EngineStream(stored=pack_stored((5, 16))) as engine, listening() as router:
            (endpoint,) = router.add(engine.spec(is_ready=False))
            await engine.peer()
            await until(lambda: router.index.num_keys(endpoint.slot) == 1)
            assert endpoint.state == "down"
            router.add(engine.spec(is_ready=True))
            assert router.registry.routable("default") == [endpoint]
            router.add(engine.spec(is_ready=False))
            assert router.registry.routable("default") == []
            assert router.index.num_keys(endpoint.slot) == 1

    run(story())


def test_a_removed_endpoint_is_let_go():
    async def story() -> None:
        async with EngineStream() as engine, listening() as router:
            (endpoint,) = router.add(engine.spec())
            peer = await engine.peer()
            await until(lambda: endpoint.state == "ready")
            router.add()
            assert endpoint.slot == -1
            peer.delta(stored=pack_stored((5, 16)))  # too late: the slot is another's by now
            (again,) = router.add(engine.spec())
            await engine.peer()
            await until(lambda: again.state == "ready")
            assert router.index.num_keys(again.slot) == 0

    run(story())


def test_frames_that_lie_end_the_stream_and_nothing_else():
    async def story() -> None:
        lies = [
            b"\xff\xff\xff\xff",  # a frame of four gigabytes
            b"\x01\x00\x00\x00\xc1",  # no msgpack
            b"\x02\x00\x00\x00\x92\xa5",  # half of it
        ]
        async with EngineStream(greets=False) as engine, listening() as router:
            (endpoint,) = router.add(engine.spec())
            for lie in lies:
                (await engine.peer()).send(lie)
            peer = await engine.peer()
            peer.say(Snapshot(b"", last=True))  # before its hello
            peer = await engine.peer()
            peer.say(engine.hello, Snapshot(b"12345", last=True))
            peer = await engine.peer()
            peer.say(engine.hello, engine.hello)
            peer = await engine.peer()
            assert endpoint.state == "connecting"
            peer.say(engine.hello, Snapshot(b"", last=True))
            await until(lambda: endpoint.state == "ready")

    run(story())


def test_the_routers_key_is_shown():
    async def story() -> None:
        async with EngineStream() as engine, listening(replace(FAST, api_key="k")) as router:
            router.add(engine.spec())
            assert (await engine.peer()).headers["authorization"] == "Bearer k"
            assert await router.signals.first_round(5.0)

    run(story())


def test_an_ejected_engine_stays_out_whatever_it_says():
    async def story() -> None:
        async with EngineStream() as engine, listening() as router:
            (endpoint,) = router.add(engine.spec())
            peer = await engine.peer()
            await until(lambda: endpoint.state == "ready")
            router.registry.eject(endpoint, "5 failures in a row")
            peer.reset()
            await engine.peer()
            await until(lambda: endpoint.reported_state == "ready" and endpoint.state == "ejected")
            router.registry.readmit(endpoint)
            assert router.registry.routable("default") == [endpoint]
            assert router.metrics.pool("default").ejections >= 1

    run(story())
