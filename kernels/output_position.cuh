// Where the results of a kernel are that a program (program.cuh) is applied to.
#pragma once

namespace program {

struct Located {  // the first element of a row of y, or of a part of a row
    int row, column;
    long long at;
};

}  // namespace program
