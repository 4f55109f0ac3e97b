// The default policy's choice over Python's own endpoints: the compiled twin of
// routing/prefix_load.py, and of what routing/dispatcher.py and flow do around it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "router/express/shapes.h"
#include "router/residency.h"
#include "router/underway.h"

namespace octavo::router {

struct Choice {
    PyObject* endpoint;  // borrowed
    nb::object reason;
    int64_t matched_tokens;
};

class Placing {
  public:
    Placing(const Shapes& shapes, nb::handle dispatcher, nb::handle rooms);

    // Nothing where the usual rules do not settle it: then the long way decides.
    std::optional<Choice> choose(PyObject* candidates, nb::handle policy, std::string_view keys,
                                 const Names& names, int64_t prompt_tokens, double tokens_per_key);

    // pricing.reserve; the generation. And pricing.release.
    int64_t reserve(PyObject* endpoint, int64_t uncached_tokens) const;
    void release(PyObject* endpoint, int64_t uncached_tokens, int64_t generation) const;

    ResidencyIndex& index() const { return *index_; }
    Underway& underway() const { return *underway_; }

  private:
    bool read(PyObject* candidates);
    bool has_room(PyObject* endpoint) const;
    void match(std::string_view keys, const Names& names, double tokens_per_key);
    size_t pick(nb::handle policy, const Names& names, size_t num_keys, int64_t prompt_tokens,
                nb::object& reason);
    size_t balance(size_t first, int64_t fair, int64_t slack, size_t num_sharers,
                   int64_t prompt_tokens, nb::object& reason) const;
    size_t sharers(const Names& names, size_t num_keys, int64_t matched,
                   int64_t prompt_tokens) const;
    // The better of two of the same price is who was picked longest ago.
    bool is_better(double price, double best, size_t place, size_t than) const;

    // As the endpoints say now, for one choice.
    struct Candidate {
        PyObject* endpoint;
        int64_t work_tokens;
        int64_t in_flight;
        int64_t pending_tokens;
        int64_t last_pick;
        double token_s;
    };

    const Shapes& shapes_;
    nb::object rooms_;
    nb::object index_object_;
    nb::object underway_object_;
    ResidencyIndex* index_;
    Underway* underway_;
    nb::object note_report_;
    nb::object lowest_, copy_, balance_;
    int64_t sequence_tokens_;
    double uncached_weight_;
    size_t min_sharers_;

    std::vector<Candidate> candidates_;
    std::vector<int64_t> slots_;
    std::vector<uint32_t> tokens_;
    std::vector<int64_t> matched_;
    std::vector<Underway::Endpoint> addresses_;
};

}  // namespace octavo::router
