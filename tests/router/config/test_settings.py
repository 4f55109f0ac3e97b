"""The router's configuration: where a value comes from, and what every mistake is told."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_router.config.check import FILTER_NAMES, SCORER_NAMES
from octavo_router.config.load import all_flags, load_config, walk
from octavo_router.config.settings import POLICIES, RouterConfig, UpstreamConfig
from octavo_router.config.show import Difference, differences, dump, reference
from octavo_router.errors import ConfigInvalid
from octavo_router.routing.filters import FILTERS
from octavo_router.routing.scorers import SCORERS


def problem(text="", **given):
    with pytest.raises(ConfigInvalid) as caught:
        load_config(text=text, **given)
    return str(caught.value)


def test_nothing_given_is_all_defaults():
    assert load_config() == RouterConfig()
    assert load_config(text="# only a comment\n") == RouterConfig()


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default():
    text = "flow: {queue_timeout_s: 1}"
    environment = {"OCTAVO_ROUTER_QUEUE_TIMEOUT": "2"}
    flags = {"queue-timeout": "3"}
    assert RouterConfig().flow.queue_timeout_s == 30.0
    assert load_config(text=text).flow.queue_timeout_s == 1.0
    assert load_config(text=text, environment=environment).flow.queue_timeout_s == 2.0
    config = load_config(text=text, environment=environment, flags=flags)
    assert config.flow.queue_timeout_s == 3.0


def test_a_flag_that_was_not_given_says_nothing():
    assert load_config(text="server: {port: 1}", flags={"port": None}).server.port == 1


def test_flags_may_be_values_or_texts():
    assert load_config(flags={"port": 9}).server.port == 9
    assert load_config(flags={"debug-endpoints": "yes"}).server.debug_endpoints is True
    assert load_config(flags={"shadow-policies": "random, session"}).routing.shadows == (
        "random",
        "session",
    )


def test_upstreams_may_be_plain_urls():
    text = "discovery: {upstreams: ['http://a:1', {url: 'http://b:2', pool: big}]}"
    assert load_config(text=text).discovery.upstreams == (
        UpstreamConfig(url="http://a:1"),
        UpstreamConfig(url="http://b:2", pool="big"),
    )
    assert load_config(flags={"upstreams": "http://a:1,http://c:3"}).discovery.upstreams == (
        UpstreamConfig(url="http://a:1"),
        UpstreamConfig(url="http://c:3"),
    )


def test_the_variable_that_kubernetes_sets_for_a_service_is_not_ours():
    environment = {"OCTAVO_ROUTER_PORT": "tcp://10.96.0.7:8080"}
    assert load_config(environment=environment).server.port == 8080


MISTAKES = [
    ("flwo: {}", "flwo: there is no such setting; did you mean 'flow'?"),
    ("flow: {max_queu: 3}", "flow.max_queu: there is no such setting; did you mean 'max_queue'?"),
    ("flow: 3", "flow: must be a mapping; got the number"),
    ("[1, 2]", "file: must be a mapping; got a list"),
    ("flow: {max_queue: many}", "flow.max_queue: must be a whole number; got the text 'many'"),
    ("flow: {max_queue: 1.5}", "flow.max_queue: must be a whole number; got the number 1.5"),
    ("flow: {max_queue: true}", "flow.max_queue: must be a whole number; got true or false True"),
    ("flow: {max_queue: -1}", "flow.max_queue: must be at least 0; got -1"),
    ("flow: {queue_timeout_s: .nan}", "flow.queue_timeout_s: must be a finite number; got nan"),
    ("timeouts: {connect_s: 0}", "timeouts.connect_s: must be at least 0.01 s; got 0"),
    ("server: {port: 70000}", "server.port: must be at most 65535; got 70000"),
    (
        "server: {log_level: loud}",
        "server.log_level: must be one of 'debug', 'info', 'warning', 'error'; got "
        "'loud'",
    ),
    ("server: {tls_cert: a.pem}", "server.tls_key: certificate and key belong together; give both"),
    (
        "routing: {policy: prefixload}",
        "routing.policy: there is no policy 'prefixload'; did you mean 'prefix-load'?",
    ),
    ("routing: {shadows: [nobody]}", "routing.shadows[0]: there is no policy 'nobody'"),
    ("routing: {session_headers: x}", "routing.session_headers: must be a list; got the text"),
    (
        "routing: {profiles: [{name: random, picker: random}]}",
        "routing.profiles[0].name: 'random' is a built-in policy's name",
    ),
    (
        "routing: {profiles: [{name: p}]}",
        "routing.profiles[0].scorers: picker 'max' needs at least one",
    ),
    (
        "routing: {profiles: [{name: p, scorers: [{name: prefx}]}]}",
        "routing.profiles[0].scorers[0].name: there is no scorer 'prefx'; did you mean "
        "'prefix'?",
    ),
    (
        "models: [{name: a, alias_of: b}, {name: b, alias_of: a}]",
        "models[0].alias_of: 'a' leads back to itself",
    ),
    ("models: [{name: a}, {name: a}]", "models: 'a' is there twice"),
    ("models: [{}]", "models: every entry needs a name"),
    (
        "models: [{name: a, alias_of: b, backends: [{pool: p}]}]",
        "models[0]: give alias_of or backends, not both",
    ),
    (
        "models: [{name: a, backends: [{pool: p, weight: 0}]}]",
        "models[0].backends: at least one weight must be above 0",
    ),
    (
        "models: [{name: a, backends: [{weight: 1}]}]",
        "models[0].backends[0].pool: must not be empty",
    ),
    (
        "models: [{name: a, mirrors: [{pool: p, percent: 101}]}]",
        "models[0].mirrors[0].percent: must be at most 100 %; got 101",
    ),
    (
        "discovery: {upstreams: ['ftp://x']}",
        "discovery.upstreams[0].url: must be http://HOST:PORT or https://…; got "
        "'ftp://x'",
    ),
    (
        "discovery: {upstreams: [{url: 'http://x', role: prefill}]}",
        "discovery.upstreams[0].role: an engine that only prefills is of use with the policy "
        "'prefill-decode'; pool 'default' has 'prefix-load'",
    ),
    ("epp: {enabled: true, port: 8080}", "epp.port: 8080 is the server's own port"),
    (
        "flow: {max_queue: [",
        "file: line 1: is not valid YAML: expected the node content, but found '<stream end>'",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[row[0][:40] for row in MISTAKES])
def test_every_mistake_is_named_with_its_remedy(text, message):
    assert message in problem(text)


def test_all_mistakes_are_named_at_once():
    text = """
    server: {port: many, tls_cert: a.pem}
    flwo: {}
    models: [{name: a}, {name: a}, {name: 3}]
    routing: {policy: prefixload}
    timeouts: {connect_s: 0}
    """
    assert problem(text, flags={"epp": "maybe", "prot": "1"}) == (
        "7 settings cannot be used: "
        "(1) --epp: must be true or false; got 'maybe'; "
        "(2) --prot: there is no such flag; did you mean 'port'?; "
        "(3) server.port: must be a whole number; got the text 'many'; "
        "(4) flwo: there is no such setting; did you mean 'flow'?; "
        "(5) models[2].name: must be a text; got the number 3; "
        "(6) timeouts.connect_s: must be at least 0.01 s; got 0; "
        "(7) routing.policy: there is no policy 'prefixload'; did you mean 'prefix-load'?"
    )


def test_a_value_that_cannot_be_read_is_not_blamed_on_its_neighbours():
    """With its default, the certificate would be without a key."""
    text = "server: {tls_cert: a.pem, tls_key: 3}"
    assert problem(text) == "server.tls_key: must be a text; got the number 3"
    assert "admin_port" not in problem("server: {admin_port: 8080}", flags={"port": "x"})


def test_mistakes_outside_the_file_are_named_by_where_they_are():
    assert problem(flags={"prot": "1"}) == "--prot: there is no such flag; did you mean 'port'?"
    assert problem(flags={"port": "x"}) == "--port: must be a whole number; got 'x'"
    assert (
        problem(environment={"OCTAVO_ROUTER_EPP": "maybe"})
        == "OCTAVO_ROUTER_EPP: must be true or false; got 'maybe'"
    )


def test_every_field_says_what_it_is():
    for path, field, _ in walk(RouterConfig):
        doc = field.metadata["doc"]
        assert doc.endswith("."), path
        assert doc[0].isupper(), path


def test_flags_are_unique_and_names_of_the_environment_follow():
    flags = all_flags()
    names = [flag.name for flag in flags]
    assert len(names) == len(set(names))
    by_name = {flag.name: flag for flag in flags}
    assert by_name["queue-timeout"].variable == "OCTAVO_ROUTER_QUEUE_TIMEOUT"
    assert by_name["policy"].path == ("routing", "policy")
    assert {"host", "port", "upstreams", "policy", "kubernetes"} <= set(names)


def test_the_names_that_are_checked_are_those_that_exist():
    assert set(FILTER_NAMES) == set(FILTERS)
    assert set(SCORER_NAMES) == set(SCORERS)
    for name in POLICIES:
        if name != "prefill-decode":
            assert load_config(flags={"policy": name}).routing.policy == name


def test_a_profile_may_be_a_pools_policy():
    text = """
    routing:
      profiles: [{name: mine, scorers: [{name: prefix, weight: 3}, {name: queue}]}]
      pools: [{name: big, policy: mine}]
    """
    config = load_config(text=text)
    assert config.routing.profiles[0].scorers[0].weight == 3.0
    assert config.routing.pools[0].policy == "mine"


def test_the_dump_hides_secrets_and_is_json():
    text = "flow: {keys: [{tenant: a, key: hunter2}, {tenant: b, sha256: '%s'}]}" % ("0" * 64)
    config = load_config(text=text)
    shown = json.dumps(dump(config))
    assert "hunter2" not in shown
    assert "0" * 64 not in shown
    first = dump(config)["flow"]["keys"][0]
    assert (first["tenant"], first["key"], first["key_env"]) == ("a", "(hidden)", "")


def test_a_reload_tells_what_changed_and_what_needs_a_restart():
    before = load_config(text="flow: {max_queue: 1}")
    after = load_config(text="flow: {max_queue: 2}\nserver: {port: 1}")
    assert differences(before, after) == [
        Difference("server.port", 8080, 1, True),
        Difference("flow.max_queue", 1, 2, False),
    ]
    assert differences(before, before) == []


def test_the_reference_has_a_row_for_every_setting():
    text = reference()
    for path, field, _ in walk(RouterConfig):
        assert f"| `{path[-1]}` |" in text, path
        assert field.metadata["doc"] in text, path
    assert "### `models[].backends[]`" in text
    assert "`--queue-timeout`, `OCTAVO_ROUTER_QUEUE_TIMEOUT`" in text


def test_nobody_else_is_let_in_unless_told():
    assert RouterConfig().server.host == "127.0.0.1"


def test_the_tree_cannot_be_changed():
    config = RouterConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.flow.max_queue = 3  # type: ignore[misc]  # that is the point


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["flow", "keys", "models", "name", "port", "server", "routing", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(values)
def test_whatever_a_file_holds_it_loads_or_is_refused_by_name(value):
    try:
        load_config(text=json.dumps(value))
    except ConfigInvalid as error:
        assert error.field in str(error)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.text(max_size=30))
def test_any_text_loads_or_is_refused(text):
    try:
        load_config(text=text)
    except ConfigInvalid as error:
        assert error.field
