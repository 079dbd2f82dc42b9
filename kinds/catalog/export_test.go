package catalog

// ApplyInSteps is Apply with a function that it calls before each step. An error of the function
// ends Apply there, like a crash.
var ApplyInSteps = apply

// Steps are the steps of Apply.
var Steps = []string{"truth tables", "projections", "truth object", "truth commit"}
