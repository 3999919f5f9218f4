// Where the results of a kernel are that a program (program.cuh) is applied to.
#pragma once

namespace program {

struct Located {  // in y: the first element of a row, or of a part of one
    int row, column;
    long long at;
};

}  // namespace program
