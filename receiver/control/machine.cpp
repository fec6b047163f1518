#include "receiver/control/machine.hpp"

namespace deltasync::control {

template class MachineOf<AllGuards>;

}  // namespace deltasync::control
