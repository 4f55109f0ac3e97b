// A visitor of a variant, from one function for each kind.
#pragma once

namespace octavo {

template <class... Functions>
struct Overloaded : Functions... {
    using Functions::operator()...;
};
template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;  // Clang before 17 does not find it itself

}  // namespace octavo
