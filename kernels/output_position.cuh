// The position in y at which a kernel's results begin; the program, which applies fused operators to the results, needs
// the position (see program.cuh).
#pragma once

namespace program {

struct Located {  // the first element of a row of y, or of a part of a row
    int row, column;
    long long at;
};

}  // namespace program
