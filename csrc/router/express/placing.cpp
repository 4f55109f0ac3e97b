#include "router/express/placing.h"

#include <algorithm>
#include <limits>

#include "router/express/texts.h"

namespace octavo::router {

namespace {

constexpr const char* kPricing = "octavo_router.routing.pricing";
constexpr const char* kPrefixLoad = "octavo_router.routing.prefix_load";

}  // namespace

Placing::Placing(const Shapes& shapes, nb::handle dispatcher, nb::handle rooms)
    : shapes_(shapes),
      rooms_(nb::borrow(rooms)),
      index_object_(dispatcher.attr("_index")),
      underway_object_(dispatcher.attr("underway")),
      index_(nb::cast<ResidencyIndex*>(index_object_)),
      underway_(nb::cast<Underway*>(underway_object_)),
      note_report_(from(kPricing, "note_report")),
      lowest_(from(kPrefixLoad, "LOWEST")),
      copy_(from(kPrefixLoad, "COPY")),
      balance_(from(kPrefixLoad, "BALANCE")),
      sequence_tokens_(nb::cast<int64_t>(from(kPricing, "SEQUENCE_TOKENS"))),
      uncached_weight_(nb::cast<double>(from(kPricing, "UNCACHED_WEIGHT"))),
      min_sharers_(nb::cast<size_t>(from(kPrefixLoad, "MIN_SHARERS"))) {}

std::optional<Choice> Placing::choose(PyObject* candidates, nb::handle policy,
                                      std::string_view keys, const Names& names,
                                      int64_t prompt_tokens, double tokens_per_key) {
    if (!shapes_.candidates.fits(candidates) || !read(candidates)) {
        return std::nullopt;
    }
    match(keys, names, tokens_per_key);
    nb::object reason = lowest_;
    const size_t at = pick(policy, names, keys.size() / 8, prompt_tokens, reason);
    return Choice{candidates_[at].endpoint, std::move(reason), matched_[at]};
}

// False: nobody is there, or none has room, or one of them has just returned and starts slowly.
bool Placing::read(PyObject* candidates) {
    const EndpointShape& shape = shapes_.endpoint;
    PyObject* endpoints = shapes_.candidates.endpoints.get(candidates);
    PyObject* slots = shapes_.candidates.slots.get(candidates);
    const auto count = static_cast<size_t>(PyList_GET_SIZE(endpoints));
    candidates_.clear();
    slots_.clear();
    addresses_.clear();
    bool is_room = false;
    for (size_t i = 0; i < count; ++i) {
        PyObject* endpoint = PyList_GET_ITEM(endpoints, i);
        if (!shape.fits(endpoint) || shape.share.as_double(endpoint) != 1.0) {
            return false;
        }
        is_room = is_room || has_room(endpoint);
    }
    if (!is_room) {
        return false;
    }
    for (size_t i = 0; i < count; ++i) {
        PyObject* endpoint = PyList_GET_ITEM(endpoints, i);
        if (shape.load.get(endpoint) != shape.priced.get(endpoint)) {
            owned(PyObject_CallOneArg(note_report_.ptr(), endpoint));
        }
        candidates_.push_back({
            .endpoint = endpoint,
            .work_tokens = shape.base_tokens.as_int(endpoint) + shape.own_tokens.as_int(endpoint),
            .in_flight = shape.in_flight.as_int(endpoint),
            .pending_tokens = shape.pending_tokens.as_int(endpoint),
            .last_pick = shape.last_pick.as_int(endpoint),
            .token_s = shape.token_s.as_double(endpoint),
        });
        slots_.push_back(to_int(PyList_GET_ITEM(slots, i)));
        addresses_.push_back(endpoint);
    }
    return true;
}

bool Placing::has_room(PyObject* endpoint) const {
    PyObject* load = shapes_.endpoint.load.get(endpoint);
    if (!shapes_.load.fits(load) || shapes_.load.is_saturated.is_true(load)) {
        return false;
    }
    PyObject* config = shapes_.rooms.config.get(rooms_.ptr());
    const int64_t seats = shapes_.endpoint.max_num_seqs.as_int(endpoint);
    const int64_t limit =
        seats != 0 ? static_cast<int64_t>(static_cast<double>(seats) *
                                          shapes_.flow.in_flight_factor.as_double(config))
                   : shapes_.flow.max_in_flight.as_int(config);
    const int64_t busy = shapes_.load.running.as_int(load) + shapes_.load.waiting.as_int(load);
    return shapes_.endpoint.in_flight.as_int(endpoint) < limit && busy < limit;
}

void Placing::match(std::string_view keys, const Names& names, double tokens_per_key) {
    matched_.assign(slots_.size(), 0);
    if (keys.empty()) {
        return;
    }
    tokens_.assign(slots_.size(), 0);
    index_->match(keys, slots_, tokens_);
    std::ranges::copy(tokens_, matched_.begin());
    if (underway_->num_computing() > 0) {
        underway_->credit(names.all(), keys, addresses_, matched_, tokens_per_key);
    }
}

bool Placing::is_better(double price, double best, size_t place, size_t than) const {
    return price < best ||
           (price == best && candidates_[place].last_pick < candidates_[than].last_pick);
}

size_t Placing::pick(nb::handle policy, const Names& names, size_t num_keys, int64_t prompt_tokens,
                     nb::object& reason) {
    double best = std::numeric_limits<double>::infinity();
    size_t at = 0;
    int64_t total = 0;
    for (size_t i = 0; i < candidates_.size(); ++i) {
        const Candidate& one = candidates_[i];
        const int64_t uncached = std::max<int64_t>(prompt_tokens - matched_[i], 1);
        const double work =
            static_cast<double>(one.work_tokens) + uncached_weight_ * static_cast<double>(uncached);
        const double price = work * one.token_s;
        if (is_better(price, best, i, at)) {
            best = price;
            at = i;
        }
        total += one.in_flight;
    }
    const Candidate& chosen = candidates_[at];
    if (chosen.in_flight < static_cast<int64_t>(min_sharers_)) {
        return at;
    }
    const int64_t most = matched_[at];
    size_t num_sharers = 0;
    if (most != 0 && *std::ranges::min_element(matched_) < most) {
        num_sharers = sharers(names, num_keys, most, prompt_tokens);
    }
    const bool is_hot = num_sharers >= min_sharers_;
    const int64_t slack = shapes_.prefix_load.slack.as_int(policy.ptr());
    if (!is_hot && chosen.in_flight < slack) {
        return at;  // whatever the others have in flight
    }
    const double factor = shapes_.prefix_load.factor.as_double(policy.ptr());
    const double fair =
        factor * static_cast<double>(total + 1) / static_cast<double>(candidates_.size());
    if (!is_hot && chosen.in_flight < std::max(slack, static_cast<int64_t>(fair))) {
        return at;
    }
    return balance(at, static_cast<int64_t>(fair), slack, num_sharers, prompt_tokens, reason);
}

// Look again, with a hot prefix's price shared and overfull endpoints left out.
size_t Placing::balance(size_t first, int64_t fair, int64_t slack, size_t num_sharers,
                        int64_t prompt_tokens, nb::object& reason) const {
    const int64_t most = matched_[first];
    const bool is_hot = num_sharers >= min_sharers_;
    const double divisor = is_hot ? static_cast<double>(1 + num_sharers) : 1.0;
    const int64_t limit = std::max(slack, fair);
    const size_t nobody = candidates_.size();
    double best = std::numeric_limits<double>::infinity();
    size_t at = nobody;
    for (size_t i = 0; i < candidates_.size(); ++i) {
        const Candidate& one = candidates_[i];
        if (one.in_flight >= limit) {
            continue;
        }
        const int64_t tokens = matched_[i];
        auto work = static_cast<double>(one.work_tokens);
        if (tokens < most) {
            work += uncached_weight_ * static_cast<double>(most - tokens) / divisor;
        } else if (is_hot) {
            // What it computes may be this very prefix: a copy would take as long.
            work -= static_cast<double>(std::min(one.pending_tokens, most));
        }
        const int64_t unique = std::max<int64_t>(prompt_tokens - std::max(tokens, most), 1);
        work += uncached_weight_ * static_cast<double>(unique);
        const double price = work * one.token_s;
        if (price < best || (at != nobody && is_better(price, best, i, at))) {
            best = price;
            at = i;
        }
    }
    if (at == nobody || at == first) {  // all are full: then the lowest price it is
        return first;
    }
    reason = candidates_[first].in_flight >= limit ? balance_ : copy_;
    return at;
}

// Requests in flight that share (about) the part of the prompt that is cached.
size_t Placing::sharers(const Names& names, size_t num_keys, int64_t matched,
                        int64_t prompt_tokens) const {
    const std::span<const uint64_t> all = names.all();
    if (all.empty()) {
        return 0;
    }
    const auto length = static_cast<size_t>(static_cast<int64_t>(num_keys) * matched /
                                            std::max<int64_t>(prompt_tokens, 1));
    // The longest name within that part; the whole prompt's where (nearly) all of it is.
    size_t at = all.size() - 1;
    if (length + 1 < num_keys) {
        const size_t inner = num_inner(length + 1);
        at = inner > 0 ? inner - 1 : 0;
    }
    return underway_->sharers(all[at]);
}

int64_t Placing::reserve(PyObject* endpoint, int64_t uncached_tokens) const {
    const EndpointShape& shape = shapes_.endpoint;
    const int64_t weight = uncached_tokens + sequence_tokens_;
    shape.in_flight.add(endpoint, int64_t{1});
    shape.pending_tokens.add(endpoint, uncached_tokens);
    shape.own_tokens.add(endpoint, weight);
    shape.recent_tokens.add(endpoint, weight);
    return shape.generation.as_int(endpoint);
}

void Placing::release(PyObject* endpoint, int64_t uncached_tokens, int64_t generation) const {
    const EndpointShape& shape = shapes_.endpoint;
    const int64_t weight = uncached_tokens + sequence_tokens_;
    shape.in_flight.add(endpoint, int64_t{-1});
    shape.pending_tokens.add(endpoint, -uncached_tokens);
    if (generation >= shape.counts_from.as_int(endpoint)) {
        shape.own_tokens.add(endpoint, -weight);
    }
    if (generation == shape.generation.as_int(endpoint)) {
        shape.recent_tokens.add(endpoint, -weight);
    }
}

}  // namespace octavo::router
