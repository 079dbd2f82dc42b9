// Package deploy compares the files that operators take from this folder with the code, and runs
// them. It is for those who change a file that operators take from here. It has only tests.
package deploy
