// Which slots of which Python classes the express lane reads and writes.
#pragma once

#include "router/express/slots.h"

namespace octavo::router {

struct ProxyShape : Shape {
    ProxyShape() : Shape("octavo_router.proxy.service", "Proxy") {}
    Slot adapters{type, "_adapters"};
    Slot facts{type, "_facts"};
    Slot id_prefix{type, "_id_prefix"};
    Slot num_ids{type, "_num_ids"};
    Slot timeouts{type, "timeouts"};
    Slot version{type, "_version"};
};

struct DispatcherShape : Shape {
    DispatcherShape() : Shape("octavo_router.routing.dispatcher", "Dispatcher") {}
    Slot num_picks{type, "num_picks"};
    Slot policies{type, "policies"};
    Slot sample_every{type, "sample_every"};
};

struct PoliciesShape : Shape {
    PoliciesShape() : Shape("octavo_router.routing.policies", "Policies") {}
    Slot by_pool{type, "by_pool"};
    Slot otherwise{type, "default"};
};

struct PrefixLoadShape : Shape {
    PrefixLoadShape() : Shape("octavo_router.routing.prefix_load", "PrefixLoad") {}
    Slot factor{type, "_factor"};
    Slot slack{type, "_slack"};
};

struct RoomsShape : Shape {
    RoomsShape() : Shape("octavo_router.routing.capacity", "PoolCapacity") {}
    Slot config{type, "config"};
};

struct HealthShape : Shape {
    HealthShape() : Shape("octavo_router.routing.health", "EndpointHealth") {}
    Slot records{type, "_records"};
};

struct ModelsShape : Shape {
    ModelsShape() : Shape("octavo_router.routing.models", "Models") {}
    Slot plain{type, "_plain"};
    Slot version{type, "_version"};
};

struct RegistryShape : Shape {
    RegistryShape() : Shape("octavo_router.endpoints.registry", "Registry") {}
    Slot endpoints{type, "endpoints"};
    Slot version{type, "version"};
};

struct GateShape : Shape {
    GateShape() : Shape("octavo_router.flow.admission", "AdmissionGate") {}
    Slot authenticate{type, "authenticate"};
};

struct TenantsShape : Shape {
    TenantsShape() : Shape("octavo_router.flow.tenant", "Tenants") {}
    Slot anonymous{type, "_anonymous"};
    Slot table{type, "table"};
};

struct KeyTableShape : Shape {
    KeyTableShape() : Shape("octavo_router.flow.keys", "KeyTable") {}
    Slot is_required{type, "is_required"};
};

struct BudgetShape : Shape {
    BudgetShape() : Shape("octavo_router.flow.budget", "RetryBudget") {}
    Slot num_active{type, "num_active"};
};

struct ThrottleShape : Shape {
    ThrottleShape() : Shape("octavo_router.flow.budget", "Throttle") {}
    Slot pools{type, "_pools"};
    Slot shares{type, "shares"};
};

struct ObserverShape : Shape {
    ObserverShape() : Shape("octavo_router.observer", "MetricsObserver") {}
    Slot ends{type, "_ends"};
    Slot picks{type, "_picks"};
    Slot placed_at{type, "_placed_at"};
};

struct MetricsShape : Shape {
    MetricsShape() : Shape("octavo_router.metrics.router_metrics", "RouterMetrics") {}
    Slot over{type, "_over"};
};

struct ClientShape : Shape {
    ClientShape() : Shape("octavo_router.http.client_connection", "ClientConnection") {}
    Slot buffer{type, "_buffer"};
    Slot client{type, "_client"};
    Slot context{type, "context"};
    Slot deadline{type, "deadline"};
    Slot has_begun{type, "has_begun"};
    Slot head{type, "head"};
    Slot is_half_closed{type, "is_half_closed"};
    Slot is_paused{type, "is_paused"};
    Slot memo{type, "_memo"};
    Slot memo_head{type, "_memo_head"};
    Slot memo_size{type, "_memo_size"};
    Slot owner{type, "owner"};
    Slot shared{type, "_shared"};
    Slot state{type, "_state"};
    Slot transport{type, "_transport"};
    Slot write{type, "write"};
};

struct SharedShape : Shape {
    SharedShape() : Shape("octavo_router.http.connection_settings", "Shared") {}
    Slot is_closing{type, "is_closing"};
    Slot service{type, "service"};
    Slot timeouts{type, "timeouts"};
};

struct RequestHeadShape : Shape {
    RequestHeadShape() : Shape("octavo_router.http.request_head", "RequestHead") {}
    Slot authorization{type, "authorization"};
    Slot credentials{type, "credentials"};
    Slot facts{type, "facts"};
    Slot forward{type, "forward"};
    Slot is_http10{type, "is_http10"};
    Slot keep_alive{type, "keep_alive"};
    Slot request_id{type, "request_id"};
    Slot target{type, "target"};
    Slot verb{type, "verb"};
};

struct FactsShape : Shape {
    FactsShape() : Shape("octavo_router.proxy.head_facts", "HeadFacts") {}
    Slot is_plain{type, "is_plain"};
    Slot needs_key{type, "needs_key"};
    Slot path{type, "path"};
    Slot reader{type, "reader"};
    Slot tenant_hint{type, "tenant_hint"};
    Slot traceparent{type, "traceparent"};
};

struct PathShape : Shape {
    PathShape() : Shape("octavo_router.proxy.paths", "ProxiedPath") {}
    Slot generates{type, "generates"};
    Slot is_json{type, "is_json"};
    Slot is_kept{type, "is_kept"};
    Slot keeps{type, "keeps"};
    Slot kind{type, "kind"};
    Slot path{type, "path"};
    Slot resumes{type, "resumes"};
};

struct TenantShape : Shape {
    TenantShape() : Shape("octavo_router.flow.tenant", "Tenant") {}
    Slot in_flight{type, "in_flight"};
    Slot is_free{type, "is_free"};
    Slot name{type, "name"};
};

struct RouteShape : Shape {
    RouteShape() : Shape("octavo_router.routing.models", "ModelRoute") {}
    Slot adapter{type, "adapter"};
    Slot copies{type, "copies"};
    Slot is_known{type, "is_known"};
    Slot pool{type, "pool"};
    Slot revision{type, "revision"};
    Slot upstream_model{type, "upstream_model"};
};

struct CandidatesShape : Shape {
    CandidatesShape() : Shape("octavo_router.endpoints.registry", "Candidates") {}
    Slot endpoints{type, "endpoints"};
    Slot slots{type, "slots"};
};

struct EndpointShape : Shape {
    EndpointShape() : Shape("octavo_router.endpoints.endpoint", "Endpoint") {}
    Slot base_tokens{type, "base_tokens"};
    Slot counts_from{type, "counts_from"};
    Slot generation{type, "generation"};
    Slot in_flight{type, "in_flight"};
    Slot kind{type, "kind"};
    Slot last_pick{type, "last_pick"};
    Slot load{type, "load"};
    Slot max_num_seqs{type, "max_num_seqs"};
    Slot own_tokens{type, "own_tokens"};
    Slot pending_tokens{type, "pending_tokens"};
    Slot priced{type, "priced"};
    Slot recent_tokens{type, "recent_tokens"};
    Slot share{type, "share"};
    Slot slot{type, "slot"};
    Slot spec{type, "spec"};
    Slot token_s{type, "token_s"};
};

struct SpecShape : Shape {
    SpecShape() : Shape("octavo_router.endpoints.endpoint", "EndpointSpec") {}
    Slot address{type, "address"};
    Slot id{type, "id"};
};

struct LoadShape : Shape {
    LoadShape() : Shape("octavo_engine.protocol.stream", "Load") {}
    Slot is_saturated{type, "is_saturated"};
    Slot running{type, "running"};
    Slot waiting{type, "waiting"};
};

struct UpstreamShape : Shape {
    UpstreamShape() : Shape("octavo_router.proxy.upstreams", "Upstream") {}
    Slot address{type, "address"};
    Slot lines{type, "lines"};
    Slot pool{type, "pool"};
};

struct LinesShape : Shape {
    LinesShape() : Shape("octavo_router.proxy.heads", "EndpointLines") {}
    Slot authority{type, "authority"};
    Slot extra{type, "extra"};
    Slot hides_authorization{type, "hides_authorization"};
    Slot host{type, "host"};
    Slot prefix{type, "prefix"};
    Slot served_by{type, "served_by"};
};

struct UpstreamPoolShape : Shape {
    UpstreamPoolShape() : Shape("octavo_router.http.upstream_pool", "UpstreamPool") {}
    Slot deadline{type, "deadline"};
    Slot idle{type, "_idle"};
    Slot idle_s{type, "idle_s"};
    Slot is_closed{type, "is_closed"};
};

struct UpstreamConnectionShape : Shape {
    UpstreamConnectionShape()
        : Shape("octavo_router.http.upstream_connection", "UpstreamConnection") {}
    Slot buffer{type, "_buffer"};
    Slot idle_since{type, "idle_since"};
    Slot num_interim{type, "_num_interim"};
    Slot parser{type, "_parser"};
    Slot pool{type, "_pool"};
    Slot state{type, "_state"};
    Slot transport{type, "_transport"};
    Slot user{type, "user"};
};

struct AnswerHeadShape : Shape {
    AnswerHeadShape() : Shape("octavo_router.http.response_head", "ResponseHead") {}
    Slot content_length{type, "content_length"};
    Slot forward{type, "forward"};
    Slot is_json{type, "is_json"};
    Slot keep_alive{type, "keep_alive"};
    Slot status{type, "status"};
};

struct RecordShape : Shape {
    RecordShape() : Shape("octavo_router.metrics.record", "RequestRecord") {}
    Slot attempts{type, "attempts"};
    Slot cached_tokens{type, "cached_tokens"};
    Slot client{type, "client"};
    Slot duration_s{type, "duration_s"};
    Slot ended_at{type, "ended_at"};
    Slot endpoint{type, "endpoint"};
    Slot endpoint_id{type, "endpoint_id"};
    Slot is_known_model{type, "is_known_model"};
    Slot is_stream{type, "is_stream"};
    Slot last_token_s{type, "last_token_s"};
    Slot model{type, "model"};
    Slot outcome{type, "outcome"};
    Slot output_tokens{type, "output_tokens"};
    Slot pick_s{type, "pick_s"};
    Slot policy{type, "policy"};
    Slot pool{type, "pool"};
    Slot predicted_tokens{type, "predicted_tokens"};
    Slot prompt_tokens{type, "prompt_tokens"};
    Slot request_bytes{type, "request_bytes"};
    Slot request_id{type, "request_id"};
    Slot response_bytes{type, "response_bytes"};
    Slot revision{type, "revision"};
    Slot route{type, "route"};
    Slot status{type, "status"};
    Slot tenant{type, "tenant"};
    Slot traceparent{type, "traceparent"};
    Slot ttft_s{type, "ttft_s"};
};

struct WindowShape : Shape {
    WindowShape() : Shape("octavo_router.flow.budget", "Windowed") {}
    Slot first{type, "_first"};
    Slot second{type, "_second"};
    Slot until{type, "_until"};
};

struct HealthRecordShape : Shape {
    HealthRecordShape() : Shape("octavo_router.routing.health", "HealthRecord") {}
    Slot last_at{type, "last_at"};
    Slot num_errors{type, "num_errors"};
    Slot num_failures{type, "num_failures"};
    Slot samples{type, "samples"};
};

struct TimeoutsShape : Shape {
    TimeoutsShape() : Shape("octavo_router.config.settings", "TimeoutsConfig") {}
    Slot first_token_per_1k_s{type, "first_token_per_1k_s"};
    Slot first_token_s{type, "first_token_s"};
    Slot idle_s{type, "idle_s"};
    Slot total_s{type, "total_s"};
};

struct FlowShape : Shape {
    FlowShape() : Shape("octavo_router.config.settings", "FlowConfig") {}
    Slot in_flight_factor{type, "in_flight_factor"};
    Slot max_in_flight{type, "max_in_flight"};
};

struct Shapes {
    ProxyShape proxy;
    DispatcherShape dispatcher;
    PoliciesShape policies;
    PrefixLoadShape prefix_load;
    RoomsShape rooms;
    HealthShape health;
    ModelsShape models;
    RegistryShape registry;
    GateShape gate;
    TenantsShape tenants;
    KeyTableShape key_table;
    BudgetShape budget;
    ThrottleShape throttle;
    ObserverShape observer;
    MetricsShape metrics;
    ClientShape client;
    SharedShape shared;
    RequestHeadShape head;
    FactsShape facts;
    PathShape path;
    TenantShape tenant;
    RouteShape route;
    CandidatesShape candidates;
    EndpointShape endpoint;
    SpecShape spec;
    LoadShape load;
    UpstreamShape upstream;
    LinesShape lines;
    UpstreamPoolShape pool;
    UpstreamConnectionShape connection;
    AnswerHeadShape answer;
    RecordShape record;
    WindowShape window;
    HealthRecordShape health_record;
    TimeoutsShape timeouts;
    FlowShape flow;
};

}  // namespace octavo::router
